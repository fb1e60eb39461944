"""The rule that says what the samples say: candidates are written, run and held against every row that was found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, combinations
from typing import Any

from attrs import evolve, frozen

from shardwise.errors import ShardingError
from shardwise.placements import PENDING_KINDS
from shardwise.rule import Row
from shardwise.signature import Kind, Op, signature
from shardwise.spec import TensorMeta
from shardwise.testing.inference.draws import out_count, probing_rule
from shardwise.testing.inference.naming import Named, name_dims, only_pending, with_ellipsis
from shardwise.testing.inference.search import may_lie
from shardwise.testing.inference.sources import Case, Source, by_case, einop_call, from_function, plain, rows_call
from shardwise.testing.inference.verdicts import Group, call_of, missing, static_args

__all__ = ["Fit", "fit"]

_WHOLE = Named((None,), (None,), {}, (), ())


@frozen(eq=False)
class Fit:
    """A rule and, per group of samples, the rows that hold and that it does not say."""

    source: Source
    unsaid: tuple[tuple[Group, frozenset[Row]], ...]


@frozen(eq=False)
class _Candidate:
    """A rule, what to return for it from a function of the arguments, and the groups of which it says all."""

    source: Source
    returned: str
    sound: bool
    covers: frozenset[int]


@frozen(eq=False)
class _Fitting:
    """All that candidates are held against."""

    op: Op
    groups: tuple[Group, ...]
    zipped: bool

    def judged(self, source: Callable[[], Source], returned: str = "") -> _Candidate | None:
        """The candidate, or none when no such rule can be made."""
        try:
            made = source()
        except (ShardingError, SyntaxError, ValueError, NameError):
            return None
        said = [missing(made.rule, group, zipped=self.zipped) for group in self.groups]
        covers = frozenset(i for i, pair in enumerate(said) if pair is not None and not any(pair))
        return _Candidate(made, returned, all(pair is not None and not pair[1] for pair in said), covers)

    def by_notation(self) -> Iterator[_Candidate]:
        for group in self.groups:
            for named in self._notations(group):
                found = self.judged(lambda named=named: plain(self.op, named, zipped=self.zipped), einop_call(named))  # type: ignore[misc]
                if found is not None:
                    yield found

    def _notations(self, group: Group) -> Iterator[Named]:
        metas = [(one.draws.operands, one.draws.outputs) for one in group.found]
        named = name_dims(group.rows, metas)
        shared = evolve(named, partial=tuple(self._pending_everywhere(len(group.found[0].draws.operands))))
        several = len({other.ndims for other in self.groups}) > 1
        for one in (named, shared) if named.partial != shared.partial else (named,):
            forms = [*with_ellipsis(one), one] if several else [one, *with_ellipsis(one)]
            for form in forms:
                yield from _for_lists(self.op, form) if not self.zipped else [form]

    def _pending_everywhere(self, count: int) -> list[str]:
        """Pending rows without shards that hold in all groups with as many operands."""
        alike = [g for g in self.groups if len(g.found[0].draws.operands) == count]
        rows = dict.fromkeys(row for group in alike for row in group.rows)
        return only_pending(row for row in rows if all(_has(group, row) for group in alike))

    # -- functions of the arguments --
    def by_argument(self, called: Sequence[str] = ("",)) -> Iterator[_Candidate]:
        """Rules in which a static argument (called so) names the dims that are whole, or those that are reduced."""
        tensors = [a for a in signature(self.op).tensor_args if not a.is_out]
        if len(tensors) != 1 or tensors[0].kind is not Kind.TENSOR or self.zipped:
            return
        x, pending = tensors[0].name, self._pending_everywhere(1)
        for name in static_args(self.groups[0].found[0].draws):
            values = [static_args(one.draws)[name] for group in self.groups for one in group.found]
            ndim = min(one.draws.operands[0].ndim for group in self.groups for one in group.found)  # type: ignore[union-attr]
            dims = _dims_expression(name, values, ndim)
            if dims is None or not any(word in name for word in called):
                continue
            for uses, lines in _by_dims(self.op, x, name, dims, pending):
                summary = f"Inferred: {name} names the dims that matter."
                found = self.judged(lambda u=uses, li=lines, s=summary: from_function(self.op, u, li, s))  # type: ignore[misc]
                if found is not None:
                    yield found

    # -- cases --
    def case_by_case(self, candidates: Sequence[_Candidate]) -> Source | None:
        """The fewest notations that cover every group, told apart by what the groups differ in."""
        left = dict.fromkeys(range(len(self.groups)))
        chosen: list[tuple[str, tuple[int, ...]]] = []
        for candidate in sorted(candidates, key=lambda c: -len(c.covers)):
            mine = tuple(i for i in left if i in candidate.covers)
            if mine:
                chosen.append((candidate.returned, mine))
            left = dict.fromkeys(i for i in left if i not in mine)
        chosen += [(self._rows_of(self.groups[i]), (i,)) for i in left]
        if len(chosen) == 1:
            return from_function(self.op, [], [f"return {chosen[0][0]}"], "Inferred row by row.", zipped=self.zipped)
        branch = {i: b for b, (_, several) in enumerate(chosen) for i in several}
        feature = _telling(self._features(), branch)
        if feature is None:
            return None
        expression, uses, values = feature
        cases = []
        for returned, several in chosen:
            for value in dict.fromkeys(values[i] for i in several):
                numbers = [n for i in several if values[i] == value for n in self.groups[i].numbers]
                cases.append(Case(value, returned, tuple(sorted(numbers))))
        return by_case(self.op, expression, uses, cases, zipped=self.zipped)

    def _rows_of(self, group: Group) -> str:
        return rows_call(group.rows, out_count(group.found[0].draws.first))

    def _features(self) -> list[tuple[str, str, list[Any]]]:
        """What groups may differ in: an expression, the argument that it reads, and its value per group."""
        probing = probing_rule(self.op)
        calls = [call_of(probing, group.found[0].draws, zipped=self.zipped).args for group in self.groups]
        statics = [static_args(group.found[0].draws) for group in self.groups]
        found = []
        for arg in signature(self.op).args:
            if arg.is_out:
                continue
            if arg.name in statics[0]:
                found.append((arg.name, arg.name, [s[arg.name] for s in statics]))
                continue
            for template, of in _OF_TENSORS if _is_tensor(calls, arg.name) else _OF_LISTS:
                with_none = any(call[arg.name] is None for call in calls)
                text = template.format(arg.name)
                text = f"(None if {arg.name} is None else {text})" if with_none else text
                found.append((text, arg.name, [None if c[arg.name] is None else of(c[arg.name]) for c in calls]))
        return [(text, name, values) for text, name, values in found if len(set(map(repr, values))) > 1]


_OF_TENSORS: tuple[tuple[str, Callable[[TensorMeta], Any]], ...] = (
    ("{}.ndim", lambda meta: meta.ndim),
    ("tuple(n == 1 for n in {}.shape)", lambda meta: tuple(n == 1 for n in meta.shape)),
)
_OF_LISTS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("len({})", len),
    ("tuple(None if t is None else t.ndim for t in {})", lambda ms: tuple(None if m is None else m.ndim for m in ms)),
)


def fit(op: Op, groups: Sequence[Group], *, zipped: bool) -> Fit:
    """The plainest rule that has every row of every group and no other; where there is none, the nearest sound one."""
    fitting = _Fitting(op, tuple(groups), zipped)
    everything = frozenset(range(len(groups)))
    candidates: list[_Candidate] = []
    # An argument called dim most likely means a dim: a rule that reads it says more than one of the dim sampled.
    for candidate in chain(fitting.by_argument(("dim", "axis")), fitting.by_notation(), fitting.by_argument()):
        if candidate.covers == everything:
            return _fit(fitting, candidate.source)
        candidates += [candidate] if candidate.returned else []
    source = fitting.case_by_case(candidates)
    if source is not None and _is_sound(fitting, source):
        return _fit(fitting, source)
    whole = fitting.judged(lambda: from_function(op, [], ['return einop("R -> R")'], "Whole.", zipped=zipped))
    sound = [c for c in (*candidates, whole) if c is not None and c.sound]
    return _fit(fitting, max(sound, key=lambda c: len(c.covers)).source)


def _is_sound(fitting: _Fitting, source: Source) -> bool:
    found = fitting.judged(lambda: source)
    return found is not None and found.sound


def _fit(fitting: _Fitting, source: Source) -> Fit:
    lacks = ((group, missing(source.rule, group, zipped=fitting.zipped)) for group in fitting.groups)
    return Fit(source, tuple((group, frozenset(pair[0])) for group, pair in lacks if pair and pair[0]))


def _has(group: Group, row: Row) -> bool:
    return row in group.rows or not any(
        len(row.inputs) == len(one.draws.operands) and may_lie(row, one.draws.operands) for one in group.found
    )


def _is_tensor(calls: Sequence[Any], name: str) -> bool:
    return not any(isinstance(call[name], tuple) for call in calls)


def _telling(
    features: Sequence[tuple[str, str, list[Any]]], branch: dict[int, int]
) -> tuple[str, tuple[str, ...], list[Any]] | None:
    """The fewest features whose values tell the branches apart: expression, arguments, value per group."""
    for n in range(1, len(features) + 1):
        for several in combinations(features, n):
            values = [tuple(f[2][i] for f in several) for i in range(len(branch))]
            if len({(repr(v), branch[i]) for i, v in enumerate(values)}) == len({repr(v) for v in values}):
                if n == 1:
                    return several[0][0], (several[0][1],), [v[0] for v in values]
                return f"({', '.join(f[0] for f in several)})", tuple(f[1] for f in several), values
    return None


# -- lists -------------------------------------------------------------------------------------------------------


def _for_lists(op: Op, named: Named) -> Iterator[Named]:
    """The notation as a rule for lists of any length has it: one operand that stands for all."""
    if all(a.kind is Kind.TENSOR for a in signature(op).tensor_args):
        yield named
        return
    if len(set(named.inputs)) == 1:
        partial = [_repeated(text) for text in named.partial]
        if None not in partial:
            yield evolve(named, inputs=named.inputs[:1], partial=tuple(text for text in partial if text))


def _repeated(text: str) -> str | None:
    left, _, right = text.partition("->")
    words = {word.strip() for word in left.split(",")}
    return f"{words.pop()}, ... ->{right}" if len(words) == 1 else None


# -- arguments that name dims ------------------------------------------------------------------------------------


def _dims_expression(name: str, values: Sequence[Any], ndim: int) -> str | None:
    """The dims that an argument names, as an expression of a collection; ``None`` when it cannot name dims."""
    if all(_is_dim(v, ndim) for v in values):
        return f"({name},)"
    if all(v is None or (isinstance(v, tuple) and all(_is_dim(n, ndim) for n in v)) for v in values):
        return name if all(values) else f"({name} or range(x.ndim))"
    return None


def _is_dim(value: Any, ndim: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -ndim <= value < ndim


def _by_dims(op: Op, x: str, name: str, dims: str, pending: Sequence[str]) -> Iterator[tuple[list[str], list[str]]]:
    partial = f", partial={_texts(pending)}" if pending else ""
    dims = dims.replace("x.ndim", f"{x}.ndim")
    yield [x, name], [f"return like({x}, whole={dims}{partial})"]
    keeps = next((a.name for a in signature(op).args if a.name == "keepdim"), None)
    kept = f"{keeps} or i not in gone" if keeps else "i not in gone"
    for kind in (*PENDING_KINDS, None):
        option = f'reduce={{names[i]: "{kind}" for i in gone}}' if kind else "replicate=[names[i] for i in gone]"
        yield (
            [x, name, *([keeps] if keeps else [])],
            [
                f"gone = {{i % {x}.ndim for i in {dims}}}",
                f'names = [f"d{{i}}" for i in range({x}.ndim)]',
                f"kept = [None if i in gone else name for i, name in enumerate(names) if {kept}]",
                f"return Flow([names], [kept], {option}{partial})",
            ],
        )


def _texts(texts: Sequence[str]) -> str:
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"
