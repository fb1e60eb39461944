"""Find the rule that fits the samples: write each candidate, run it, and compare its rows with those of the search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

from attrs import evolve, frozen

from shardwise.errors import ShardingError
from shardwise.kernel.rule import Row
from shardwise.kernel.signature import Kind, Op, signature
from shardwise.testing.inference.dim_arguments import by_dims, dims_expression
from shardwise.testing.inference.draws import list_spans
from shardwise.testing.inference.features import features, joined, telling
from shardwise.testing.inference.naming import Named, name_dims, only_partial, with_ellipsis
from shardwise.testing.inference.search import may_lie
from shardwise.testing.inference.sources import Case, Source, by_case, einop_call, from_function, plain, rows_call
from shardwise.testing.inference.verdicts import Group, missing, static_args

__all__ = ["Fit", "fit"]


@frozen(eq=False)
class Fit:
    """A rule and, for each group of samples, the rows that hold and that the rule lacks."""

    source: Source
    unsaid: tuple[tuple[Group, frozenset[Row]], ...]


@frozen(eq=False)
class _JudgedSource:
    """A candidate: a rule, the expression that a function of the arguments returns for it, and how well it fits.

    ``sound`` means that it has no row that a group lacks. ``covers`` are the groups that have exactly its rows.
    """

    source: Source
    returned: str
    sound: bool
    covers: frozenset[int]


def fit(op: Op, groups: Sequence[Group], *, zipped: bool) -> Fit:
    """The simplest rule that has exactly the rows of every group, or else the nearest sound rule.

    For an op that takes a list of tensors, the rule leaves out rows that place the elements of a list differently.
    """
    without_mixed_lists = []
    for group in groups:
        spans = list_spans(group.searches[0].draws.first)
        rows = [row for row in group.rows if all(len(set(row.inputs[a:b])) < 2 for a, b in spans)]  # noqa: PLR2004
        without_mixed_lists.append(evolve(group, rows=tuple(rows)))
    fitting = _Fitting(op, tuple(without_mixed_lists), zipped)
    source = fitting.best()
    lacks = ((group, missing(source.rule, group, zipped=zipped)) for group in groups)
    return Fit(source, tuple((group, frozenset(pair[0])) for group, pair in lacks if pair and pair[0]))


@frozen(eq=False)
class _Fitting:
    """The groups that candidates are compared with."""

    op: Op
    groups: tuple[Group, ...]
    zipped: bool

    def best(self) -> Source:
        everything = frozenset(range(len(self.groups)))
        # An int argument had one value in all samples, and not its default: with other values, other rows may hold.
        statics = [static_args(one.draws) for group in self.groups for one in group.searches]
        guarded = False
        for arg in signature(self.op).args:
            if arg.kind is Kind.BY_VALUE and len({repr(static[arg.name]) for static in statics}) == 1:
                value = statics[0][arg.name]
                default = tuple(arg.default) if isinstance(arg.default, list) else arg.default
                guarded |= isinstance(value, (int, tuple)) and not (arg.has_default and value == default)
        candidates: list[_JudgedSource] = []
        # An argument called dim most likely names a dim: a rule that reads it covers more calls than one for the dims
        # of the samples.
        for candidate in chain(self.by_argument(("dim", "axis")), self.by_notation()):
            candidates.append(candidate)
            if candidate.covers == everything and not (guarded and candidate.returned):
                return candidate.source
        candidates += self.by_argument()
        for candidate in candidates:
            if candidate.covers == everything and not candidate.returned:
                return candidate.source
        candidates = [c for c in candidates if c.returned]
        by_case = self.judged(lambda: self._case_by_case(candidates))
        if by_case is not None and by_case.sound and by_case.covers == everything:
            return by_case.source
        lines = ['return einop("R -> R")']
        whole = self.judged(lambda: from_function(self.op, [], lines, "All tensors whole.", zipped=self.zipped))
        sound = [c for c in (*candidates, by_case, whole) if c is not None and c.sound]
        return max(sound, key=lambda c: len(c.covers)).source

    def judged(self, make: Callable[[], Source], returned: str = "") -> _JudgedSource | None:
        """The candidate; ``None`` if such a rule cannot be made."""
        try:
            source = make()
        except (ShardingError, SyntaxError, ValueError, NameError):
            return None
        faults = [missing(source.rule, group, zipped=self.zipped) for group in self.groups]
        covers = frozenset(i for i, pair in enumerate(faults) if pair is not None and not any(pair))
        return _JudgedSource(source, returned, all(pair is not None and not pair[1] for pair in faults), covers)

    # -- one notation --
    def by_notation(self) -> Iterator[_JudgedSource]:
        """Rules with one notation, from the rows of each group."""
        for group in self.groups:
            draws = [one.draws for one in group.searches]
            own = name_dims(group.rows, [(d.operands, d.outputs) for d in draws])
            shared = evolve(own, partial=tuple(self._partial_everywhere(len(draws[0].operands))))
            for named in (own, shared) if own.partial != shared.partial else (own,):
                for form in _forms(named, self.groups):
                    for notation in (form,) if self.zipped else _for_lists(self.op, form):
                        make = partial(plain, self.op, notation, zipped=self.zipped)
                        candidate = self.judged(make, einop_call(self.op, notation))
                        if candidate is not None:
                            yield candidate

    def _partial_everywhere(self, count: int) -> list[str]:
        """Partial rows without shards that hold in all groups with ``count`` operands."""
        groups = [g for g in self.groups if len(g.searches[0].draws.operands) == count]
        rows = dict.fromkeys(row for group in groups for row in group.rows)
        for group in groups:
            # A row that the search does not try on a group says nothing against it.
            operands = [one.draws.operands for one in group.searches]
            for row in set(rows) - set(group.rows):
                if any(len(row.inputs) == len(metas) and may_lie(row, metas) for metas in operands):
                    del rows[row]
        return only_partial(rows)

    # -- functions of the arguments --
    def by_argument(self, called: Sequence[str] = ("",)) -> Iterator[_JudgedSource]:
        """Rules in which a static argument names the dims that are whole, or those that are reduced.

        The argument's name has one of the words ``called`` in it.
        """
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
    def _case_by_case(self, candidates: Sequence[_JudgedSource]) -> Source:
        """The fewest notations that cover every group. The features in which groups differ tell the cases apart."""
        left = list(range(len(self.groups)))
        chosen: list[tuple[str, list[int]]] = []
        for candidate in sorted(candidates, key=lambda c: -len(c.covers)):
            mine = [i for i in left if i in candidate.covers]
            chosen += [(candidate.returned, mine)] if mine else []
            left = [i for i in left if i not in mine]
        for i in left:
            group = self.groups[i]
            chosen.append((rows_call(group.rows, group.searches[0].draws.first.outs), [i]))
        branch = {i: b for b, (_, several) in enumerate(chosen) for i in several}
        differing = telling(features(self.op, self.groups, zipped=self.zipped), [branch[i] for i in sorted(branch)])
        if differing is None:
            msg = "the groups of samples differ in nothing that a rule can read"
            raise ValueError(msg)
        feature = joined(differing)
        cases = []
        for returned, several in chosen:
            by_value: dict[str, list[int]] = {}
            for i in several:
                by_value.setdefault(repr(feature.values[i]), []).append(i)
            for same in by_value.values():
                numbers = tuple(sorted(n for i in same for n in self.groups[i].numbers))
                cases.append(Case(feature.values[same[-1]], returned, numbers))
        return by_case(self.op, feature.text, feature.uses, cases, zipped=self.zipped)


def _forms(named: Named, groups: Sequence[Group]) -> list[Named]:
    """The notation as it is, and with ``...``. The latter comes first if nothing else is left of it, or if results
    differ in ndim.
    """
    shorter = list(with_ellipsis(named))
    if len({group.ndims for group in groups}) == 1:
        return [named, *shorter]
    tensors = [dims for one in shorter[:1] for dims in (*one.inputs, *one.outputs)]
    only_dots = all(not dims or dims == ("...",) for dims in tensors)
    if only_dots or len({tuple(m and m.ndim for m in group.searches[0].draws.outputs) for group in groups}) > 1:
        return [*shorter, named]
    return [named, *shorter]


def _for_lists(op: Op, named: Named) -> Iterator[Named]:
    """The notation of a rule for lists of any length: one operand stands for all. Nothing if the operands differ."""
    if all(a.kind is Kind.TENSOR for a in signature(op).tensor_args):
        yield named
    elif len(set(named.inputs)) == 1:
        yield evolve(named, inputs=named.inputs[:1], partial=tuple(map(_repeated, named.partial)))


def _repeated(text: str) -> str:
    """An explicit row for any number of operands, each with the entry of the first."""
    left, _, right = text.partition("->")
    return f"{left.split(',')[0].strip()}, ... ->{right}"
