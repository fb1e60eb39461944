"""The rule that fits the samples: each candidate is written, run, and compared with every row of the search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from attrs import evolve, field, frozen

from shardwise.errors import ShardingError
from shardwise.kernel.rule import Row
from shardwise.kernel.signature import Arg, Kind, Op, signature
from shardwise.testing.inference.dim_arguments import by_dims, dims_expression
from shardwise.testing.inference.draws import list_spans, out_count
from shardwise.testing.inference.features import features, joined, telling
from shardwise.testing.inference.naming import Named, name_dims, only_partial, with_ellipsis
from shardwise.testing.inference.search import may_lie
from shardwise.testing.inference.sources import Case, Source, by_case, einop_call, from_function, plain, rows_call
from shardwise.testing.inference.verdicts import Group, missing, static_args

__all__ = ["Fit", "fit"]


@frozen(eq=False)
class Fit:
    """A rule and, per group of samples, the rows that hold and that it lacks."""

    source: Source
    unsaid: tuple[tuple[Group, frozenset[Row]], ...]


@frozen(eq=False)
class _JudgedSource:
    """A rule, what to return for it from a function of the arguments, and the groups of which it says all."""

    source: Source
    returned: str
    sound: bool
    covers: frozenset[int]


def fit(op: Op, groups: Sequence[Group], *, zipped: bool) -> Fit:
    """The simplest rule that has exactly the rows of every group, or else the nearest sound rule.

    Of an op that takes a list of tensors, rows that place the elements of a list differently are left unsaid.
    """
    fitting = _Fitting(op, tuple(evolve(g, rows=_alike_in_lists(g)) for g in groups), zipped)
    source = fitting.best()
    lacks = ((group, missing(source.rule, group, zipped=zipped)) for group in groups)
    return Fit(source, tuple((group, frozenset(pair[0])) for group, pair in lacks if pair and pair[0]))


def _alike_in_lists(group: Group) -> tuple[Row, ...]:
    spans = list_spans(group.searches[0].draws.first)
    return tuple(row for row in group.rows if all(len(set(row.inputs[a:b])) < 2 for a, b in spans))  # noqa: PLR2004


@frozen(eq=False)
class _Fitting:
    """The groups that candidates are compared with."""

    op: Op
    groups: tuple[Group, ...]
    zipped: bool
    everything: frozenset[int] = field(init=False)

    @everything.default
    def _everything(self) -> frozenset[int]:
        return frozenset(range(len(self.groups)))

    def best(self) -> Source:
        # An argument called dim most likely means a dim: a rule that reads it says more than one of the dim sampled.
        guarded = self._hangs_on_one_value()
        candidates: list[_JudgedSource] = []
        for candidate in chain(self.by_argument(("dim", "axis")), self.by_notation()):
            candidates.append(candidate)
            if candidate.covers == self.everything and not (guarded and candidate.returned):
                return candidate.source
        candidates += self.by_argument()
        whole = next((c.source for c in candidates if c.covers == self.everything and not c.returned), None)
        return whole or self._case_by_case_or_less([c for c in candidates if c.returned])

    def _hangs_on_one_value(self) -> bool:
        """Whether an int argument that is not the default had one value in all samples; others may give other rows."""
        statics = [static_args(one.draws) for group in self.groups for one in group.searches]
        return any(
            len({repr(static[a.name]) for static in statics}) == 1 and _is_chosen(a, statics[0][a.name])
            for a in signature(self.op).args
            if a.kind is Kind.BY_VALUE
        )

    def judged(self, source: Callable[[], Source], returned: str = "") -> _JudgedSource | None:
        """The candidate, or ``None`` when such a rule cannot be made."""
        try:
            made = source()
        except (ShardingError, SyntaxError, ValueError, NameError):
            return None
        said = [missing(made.rule, group, zipped=self.zipped) for group in self.groups]
        covers = frozenset(i for i, pair in enumerate(said) if pair is not None and not any(pair))
        return _JudgedSource(made, returned, all(pair is not None and not pair[1] for pair in said), covers)

    # -- one notation --
    def by_notation(self) -> Iterator[_JudgedSource]:
        """Rules with one notation, from the rows of each group."""
        for group in self.groups:
            for named in self._notations(group):
                source = partial(plain, self.op, named, zipped=self.zipped)
                candidate = self.judged(source, einop_call(named))
                if candidate is not None:
                    yield candidate

    def _notations(self, group: Group) -> Iterator[Named]:
        draws = [one.draws for one in group.searches]
        named = name_dims(group.rows, [(d.operands, d.outputs) for d in draws])
        shared = evolve(named, partial=tuple(self._partial_everywhere(len(draws[0].operands))))
        for one in (named, shared) if named.partial != shared.partial else (named,):
            for form in _forms(one, self.groups):
                yield from (form,) if self.zipped else _for_lists(self.op, form)

    def _partial_everywhere(self, count: int) -> list[str]:
        """Partial rows without shards that hold in all groups with as many operands."""
        alike = [g for g in self.groups if len(g.searches[0].draws.operands) == count]
        rows = dict.fromkeys(row for group in alike for row in group.rows)
        return only_partial(row for row in rows if all(_has(group, row) for group in alike))

    # -- functions of the arguments --
    def by_argument(self, called: Sequence[str] = ("",)) -> Iterator[_JudgedSource]:
        """Rules in which a static argument (called so) names the dims that are whole, or those that are reduced."""
        tensors = [a for a in signature(self.op).tensor_args if not a.is_out]
        if len(tensors) != 1 or self.zipped:
            return
        counts = {len(group.searches[0].draws.operands) for group in self.groups}
        partials = [
            _repeated(t) if tensors[0].kind is Kind.TENSORS else t for t in self._partial_everywhere(max(counts))
        ]
        draws = [one.draws for group in self.groups for one in group.searches]
        for name in static_args(draws[0]):
            values = [(static_args(d)[name], d.operands[0]) for d in draws]
            dims = dims_expression(name, values) if any(word in name for word in called) else None
            for body in by_dims(self.op, tensors[0], name, dims, partials) if dims else ():
                candidate = self.judged(lambda body=body: from_function(self.op, body.uses, body.lines, body.summary))  # type: ignore[misc]
                if candidate is not None:
                    yield candidate

    # -- cases --
    def _case_by_case_or_less(self, candidates: Sequence[_JudgedSource]) -> Source:
        by_case = self.judged(lambda: self._case_by_case(candidates))
        if by_case is not None and by_case.sound and by_case.covers == self.everything:
            return by_case.source
        returned = 'return einop("R -> R")'
        whole = self.judged(lambda: from_function(self.op, [], [returned], "All tensors whole.", zipped=self.zipped))
        sound = [c for c in (*candidates, by_case, whole) if c is not None and c.sound]
        return max(sound, key=lambda c: len(c.covers)).source

    def _case_by_case(self, candidates: Sequence[_JudgedSource]) -> Source:
        """The fewest notations that cover every group, distinguished by what the groups differ in."""
        left = list(range(len(self.groups)))
        chosen: list[tuple[str, list[int]]] = []
        for candidate in sorted(candidates, key=lambda c: -len(c.covers)):
            mine = [i for i in left if i in candidate.covers]
            chosen += [(candidate.returned, mine)] if mine else []
            left = [i for i in left if i not in mine]
        chosen += [(self._rows_of(self.groups[i]), [i]) for i in left]
        branch = {i: b for b, (_, several) in enumerate(chosen) for i in several}
        asked = telling(features(self.op, self.groups, zipped=self.zipped), [branch[i] for i in sorted(branch)])
        if asked is None:
            msg = "the groups of samples differ in nothing that a rule can ask for"
            raise ValueError(msg)
        feature = joined(asked)
        cases = [case for returned, several in chosen for case in self._cases(returned, several, feature.values)]
        return by_case(self.op, feature.text, feature.uses, cases, zipped=self.zipped)

    def _cases(self, returned: str, groups: Sequence[int], values: Sequence[object]) -> Iterator[Case]:
        for value in {repr(values[i]): values[i] for i in groups}.values():
            same = [i for i in groups if repr(values[i]) == repr(value)]
            yield Case(value, returned, tuple(sorted(n for i in same for n in self.groups[i].numbers)))

    def _rows_of(self, group: Group) -> str:
        return rows_call(group.rows, out_count(group.searches[0].draws.first))


def _is_chosen(arg: Arg, value: object) -> bool:
    default = tuple(arg.default) if isinstance(arg.default, list) else arg.default
    return isinstance(value, (int, tuple)) and not (arg.has_default and value == default)


def _has(group: Group, row: Row) -> bool:
    return row in group.rows or not any(
        len(row.inputs) == len(one.draws.operands) and may_lie(row, one.draws.operands) for one in group.searches
    )


def _forms(named: Named, groups: Sequence[Group]) -> list[Named]:
    """The notation as it is, and with ``...``: first where it is all there is or results vary in ndim."""
    shorter = list(with_ellipsis(named))
    if len({group.ndims for group in groups}) == 1:
        return [named, *shorter]
    tensors = [dims for one in shorter[:1] for dims in (*one.inputs, *one.outputs)]
    plain = all(not dims or dims == ("...",) for dims in tensors)
    if plain or len({tuple(m and m.ndim for m in group.searches[0].draws.outputs) for group in groups}) > 1:
        return [*shorter, named]
    return [named, *shorter]


def _for_lists(op: Op, named: Named) -> Iterator[Named]:
    """The notation as a rule for lists of any length has it: one operand that stands for all."""
    if all(a.kind is Kind.TENSOR for a in signature(op).tensor_args):
        yield named
    elif len(set(named.inputs)) == 1:
        yield evolve(named, inputs=named.inputs[:1], partial=tuple(map(_repeated, named.partial)))


def _repeated(text: str) -> str:
    """An explicit row whose entries are all the same, for any number of operands."""
    left, _, right = text.partition("->")
    return f"{left.split(',')[0].strip()}, ... ->{right}"
