"""The verdict of all samples on each row, and the rows that a rule must have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from attrs import evolve, frozen

from shardwise.errors import ShardingError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import Shard, show_all
from shardwise.kernel.rule import Row, Rule, runs_other_code
from shardwise.kernel.signature import Call, Kind
from shardwise.planning.strategies import make_call
from shardwise.testing.inference.draws import Draws
from shardwise.testing.inference.probe import written_results
from shardwise.testing.inference.search import SampleSearch, even_meshes, may_lie

__all__ = ["Finding", "Group", "Verdict", "call_of", "findings", "grouped", "missing", "rule_rows"]

Verdict = Literal["all samples", "some samples", "even shards only", "some meshes"]


@frozen
class Finding:
    """A row, and the numbers of the samples for which it held on every mesh, and for which it failed on some mesh.

    ``meshes`` are the mesh sizes on which it held for some sample. ``form`` describes the samples: the numbers of dims
    of the operands, and which dims have one element.
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
    """Every row that held for some sample on some mesh. Forms come in the order of the samples."""
    forms: dict[tuple[str, ...], list[SampleSearch]] = {}
    for one in searches:
        forms.setdefault(_form(one.draws), []).append(one)
    rows: list[Finding] = []
    for form, of_form in forms.items():
        for row in dict.fromkeys(row for one in of_form for row in one.rows):
            tried = [one for one in of_form if may_lie(row, one.draws.operands)]
            verdict, conditional, held = _verdict_on(row, tried)
            # Without a shard the number of ranks decides nothing: a row that held on some meshes held by accident.
            if verdict == "some meshes" and not any(isinstance(p, Shard) for p in row.inputs):
                continue
            holds_for = tuple(one.draws.number for one in held)
            fails_for = tuple(one.draws.number for one in tried if one not in held)
            meshes = tuple(sorted({n for one in tried if row in one.rows for n in one.rows[row].held}))
            rows.append(Finding(conditional, ", ".join(form), verdict, holds_for, fails_for, meshes))
    return tuple(rows)


def _verdict_on(row: Row, tried: Sequence[SampleSearch]) -> tuple[Verdict, Row, list[SampleSearch]]:
    """The verdict of samples of one form on a row, the row with its condition, and the samples for which it holds."""
    # A row that fails only for empty shards holds under the condition that no shard is empty. That needs uneven shards
    # for which it held; even shards alone do not show it.
    unevenly = any(one.rows[row].held_unevenly for one in tried if row in one.rows)
    held = [
        one
        for one in tried
        if row in one.rows and (one.rows[row].holds or (one.rows[row].holds_unless_empty and unevenly))
    ]
    conditional = row
    if not all(one.rows[row].holds for one in held):
        conditional = evolve(row, nonempty=tuple((i, p.dim) for i, p in enumerate(row.inputs) if isinstance(p, Shard)))
    if held:
        return ("all samples" if len(held) == len(tried) else "some samples"), conditional, held
    if not tried:
        return "all samples", conditional, held
    for one in tried:
        evidence = one.rows.get(row)
        even = even_meshes(row.inputs, one.draws.operands) if evidence is None else evidence.even - evidence.held
        if even:  # it failed on even shards, too
            return "some meshes", row, []
    return "even shards only", row, []


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
    """The samples by form and static arguments. Groups whose dims all have several elements come first."""
    groups: dict[Any, list[SampleSearch]] = {}
    for one in searches:
        trial = one.draws.first
        static = [
            v for a, v in zip(trial.signature.args, trial.values, strict=True) if a not in trial.signature.tensor_args
        ]
        groups.setdefault((_form(one.draws), repr(static)), []).append(one)
    with_rows = []
    for of_group in groups.values():
        rows = dict.fromkeys(row for one in of_group for row in one.rows)
        verdicts = [_verdict_on(row, [one for one in of_group if may_lie(row, one.draws.operands)]) for row in rows]
        common = tuple(row for verdict, row, _ in verdicts if verdict == "all samples")
        with_rows.append(Group(tuple(of_group), common))
    return sorted(with_rows, key=lambda group: any("1" in form for form in _form(group.searches[0].draws)))


def call_of(rule: Rule, draws: Draws, *, zipped: bool) -> Call:
    """The sample's call as a rule sees it. For a zipped op it is the call at its one list position."""
    schema = evolve(draws.first, rule=rule).schema(AbstractMesh(()))
    call = make_call(rule, schema, draws.outputs)
    return call.position(0) if zipped else call


def rule_rows(rule: Rule, draws: Draws, *, zipped: bool = False) -> set[Row]:
    """The rows of a rule that the search can find for a sample: they run the op itself, on placements that it tries."""
    same = written_results(draws.first)
    count = len(draws.operands)
    is_other_code = runs_other_code(rule)
    rows = set()
    for row in rule.rows(call_of(rule, draws, zipped=zipped)):
        inputs = row.inputs[:count]
        outputs = tuple(None if m is None else p for p, m in zip(row.outputs, draws.outputs, strict=True))
        plain = not (row.lowered and is_other_code) and not row.divides and may_lie(Row(inputs, ()), draws.operands)
        stays = all(outputs[o] == inputs[i] for o, i in same if i < count)
        shards_one_element = any(
            isinstance(p, Shard) and m is not None and m.shape[p.dim] == 1
            for p, m in zip(outputs, draws.outputs, strict=True)
        )
        if plain and stays and not shards_one_element:
            rows.add(Row(inputs, outputs, nonempty=row.nonempty))
    return rows


def missing(rule: Rule, group: Group, *, zipped: bool) -> tuple[set[Row], set[Row]] | None:
    """The group's rows that a rule lacks, and the rule's rows that the group lacks; ``None`` if it refuses a call."""
    lacks: set[Row] = set()
    beyond: set[Row] = set()
    for one in group.searches:
        try:
            has = rule_rows(rule, one.draws, zipped=zipped)
        except (ShardingError, LookupError, TypeError, ValueError, AttributeError, NameError, ZeroDivisionError):
            return None
        held = {row for row in group.rows if may_lie(row, one.draws.operands)}
        lacks |= held - has
        beyond |= has - held
    return lacks, beyond


def static_args(draws: Draws) -> dict[str, Any]:
    """The static arguments of a sample by name, lists as tuples, as a rule gets them."""
    trial = draws.first
    values = zip(trial.signature.args, trial.values, strict=True)
    static = (Kind.BY_VALUE, Kind.BY_TYPE)
    return {a.name: tuple(v) if isinstance(v, list) else v for a, v in values if a.kind in static}
