"""The verdict of all samples on each row, and the rows that a rule must have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import evolve, frozen

from shardwise.errors import ShardingError
from shardwise.kernel.placements import Shard, show_all
from shardwise.kernel.rule import Row, Rule
from shardwise.kernel.signature import Call, Kind
from shardwise.kernel.spec import AbstractMesh, TensorMeta
from shardwise.planning.strategies import make_call
from shardwise.testing.inference.draws import Draws
from shardwise.testing.inference.probe import written_results
from shardwise.testing.inference.search import SampleSearch, even_meshes, may_lie

__all__ = ["Finding", "Group", "Verdict", "call_of", "findings", "grouped", "missing", "rule_rows"]

Verdict = Literal["all samples", "some samples", "even shards only", "some meshes"]


@frozen
class Finding:
    """A row and the samples, by number, for which it held on every mesh; ``meshes`` are sizes where it held at all.

    ``form`` says of which samples: the numbers of dims of the operands, and which dims have one element.
    """

    row: Row
    form: str
    verdict: Verdict
    holds_for: tuple[int, ...]
    fails_for: tuple[int, ...]
    meshes: tuple[int, ...]

    def __str__(self) -> str:
        unless = ", no shard empty" if self.row.nonempty else ""
        return f"{show_all(self.row.inputs)} -> {show_all(self.row.outputs)}{unless}"


def _form(draws: Draws) -> tuple[str, ...]:
    return tuple(
        "-" if m is None else " ".join("1" if n == 1 else "n" for n in m.shape) or "()" for m in draws.operands
    )


def findings(searches: Sequence[SampleSearch]) -> tuple[Finding, ...]:
    """Every row that held for some sample on some mesh, form by form in the order of the samples."""
    forms: dict[tuple[str, ...], list[SampleSearch]] = {}
    for one in searches:
        forms.setdefault(_form(one.draws), []).append(one)
    listed = [
        _finding(row, ", ".join(form), several)
        for form, several in forms.items()
        for row in dict.fromkeys(row for one in several for row in one.rows)
    ]
    # Where nothing is sharded, the number of ranks decides nothing: a row that held on some meshes held by accident.
    return tuple(f for f in listed if f.verdict != "some meshes" or any(isinstance(p, Shard) for p in f.row.inputs))


def _finding(row: Row, form: str, searches: Sequence[SampleSearch]) -> Finding:
    tried = [one for one in searches if may_lie(row, one.draws.operands)]
    verdict, said, held = _settled(row, tried)
    return Finding(
        said,
        form,
        verdict,
        tuple(one.draws.number for one in held),
        tuple(one.draws.number for one in tried if one not in held),
        tuple(sorted({n for one in tried if row in one.rows for n in one.rows[row].held})),
    )


def _settled(row: Row, tried: Sequence[SampleSearch]) -> tuple[Verdict, Row, list[SampleSearch]]:
    """The verdict of samples of one form on a row, the row with its condition, and the samples for which it holds."""
    known = [one.rows[row] for one in tried if row in one.rows]
    # A row that fails for empty shards alone is one for shards that are not; if only even ones are left, who knows.
    unevenly = any(evidence.held_unevenly for evidence in known)
    held = [
        one
        for one in tried
        if row in one.rows and (one.rows[row].holds or (one.rows[row].holds_unless_empty and unevenly))
    ]
    if not all(one.rows[row].holds for one in held):
        said = evolve(row, nonempty=tuple((i, p.dim) for i, p in enumerate(row.inputs) if isinstance(p, Shard)))
    else:
        said = row
    if len(held) == len(tried):
        return "all samples", said, held
    if held:
        return "some samples", said, held
    return ("even shards only" if all(_holds_when_even(row, one) for one in tried) else "some meshes"), row, []


def _holds_when_even(row: Row, search: SampleSearch) -> bool:
    evidence = search.rows.get(row)
    if evidence is None:
        return not even_meshes(row.inputs, search.draws.operands)
    return evidence.even <= evidence.held


# -- what a rule must have ---------------------------------------------------------------------------------------


@frozen(eq=False)
class Group:
    """Samples of one form with the same static arguments, and the rows that hold for all of them."""

    searches: tuple[SampleSearch, ...]
    rows: tuple[Row, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(one.draws.number for one in self.searches)

    @property
    def ndims(self) -> tuple[int | None, ...]:
        """The numbers of dims of operands and results."""
        first = self.searches[0].draws
        return tuple(None if m is None else m.ndim for m in (*first.operands, None, *first.outputs))


def grouped(searches: Sequence[SampleSearch]) -> list[Group]:
    """The samples by form and static arguments; those of which no dim has one element come first."""
    groups: dict[Any, list[SampleSearch]] = {}
    for one in searches:
        trial = one.draws.first
        static = [
            v for a, v in zip(trial.signature.args, trial.values, strict=True) if a not in trial.signature.tensor_args
        ]
        groups.setdefault((_form(one.draws), repr(static)), []).append(one)
    whole = [Group(tuple(several), tuple(_common(several))) for several in groups.values()]
    return sorted(whole, key=lambda group: any("1" in form for form in _form(group.searches[0].draws)))


def _common(searches: Sequence[SampleSearch]) -> list[Row]:
    settled = (
        _settled(row, [one for one in searches if may_lie(row, one.draws.operands)])
        for row in dict.fromkeys(row for one in searches for row in one.rows)
    )
    return [row for verdict, row, _ in settled if verdict == "all samples"]


def call_of(rule: Rule, draws: Draws, *, zipped: bool) -> Call:
    """The sample's call as a rule sees it; of a zipped op, of its one list position."""
    schema = evolve(draws.first, rule=rule).schema(AbstractMesh(()))
    call = make_call(rule, schema, draws.outputs)
    return call.position(0) if zipped else call


def rule_rows(rule: Rule, draws: Draws, *, zipped: bool = False) -> set[Row]:
    """What a rule says of a sample in the search's terms: rows that run the op itself on placings that were tried."""
    same = written_results(draws.first)
    count = len(draws.operands)
    rows = set()
    for row in rule.rows(call_of(rule, draws, zipped=zipped)):
        inputs = row.inputs[:count]
        outputs = tuple(None if m is None else p for p, m in zip(row.outputs, draws.outputs, strict=True))
        plain = not row.lowered and not row.divides and may_lie(Row(inputs, ()), draws.operands)
        stays = all(outputs[o] == inputs[i] for o, i in same if i < count)
        if plain and stays and not _shards_one_element(outputs, draws.outputs):
            rows.add(Row(inputs, outputs, nonempty=row.nonempty))
    return rows


def _shards_one_element(placements: Sequence[Any], metas: Sequence[TensorMeta | None]) -> bool:
    return any(
        isinstance(p, Shard) and m is not None and m.shape[p.dim] == 1 for p, m in zip(placements, metas, strict=True)
    )


def missing(rule: Rule, group: Group, *, zipped: bool) -> tuple[set[Row], set[Row]] | None:
    """The group's rows that a rule lacks and those that it has beyond them; ``None`` when it does not fit the calls."""
    lacks: set[Row] = set()
    beyond: set[Row] = set()
    for one in group.searches:
        try:
            has = rule_rows(rule, one.draws, zipped=zipped)
        except (ShardingError, LookupError, TypeError, ValueError, AttributeError, NameError, ZeroDivisionError):
            return None
        wanted = {row for row in group.rows if may_lie(row, one.draws.operands)}
        lacks |= wanted - has
        beyond |= has - wanted
    return lacks, beyond


def static_args(draws: Draws) -> dict[str, Any]:
    """The static arguments of a sample by name, lists as tuples, as a rule gets them."""
    trial = draws.first
    values = zip(trial.signature.args, trial.values, strict=True)
    static = (Kind.BY_VALUE, Kind.BY_TYPE)
    return {a.name: tuple(v) if isinstance(v, list) else v for a, v in values if a.kind in static}
