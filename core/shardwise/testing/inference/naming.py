"""From rows to named dims: which dims of the tensors are sharded together, and which rows are written out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

from attrs import define, evolve, field, frozen

from shardwise.kernel.placements import REPLICATE, Partial, Placement, Shard
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import Row
from shardwise.kernel.tensor_meta import TensorMeta

__all__ = ["Metas", "Named", "collapsed", "name_dims", "only_partial", "with_ellipsis"]

# (operands, results) of one sample.
Metas = tuple[Sequence[TensorMeta | None], Sequence[TensorMeta | None]]
# Side (in or out), number of the tensor, dim.
Place = tuple[str, int, int]
Operand = tuple[str, ...] | None

_POOLS = {"all": "bgc", "passes": "mnpqstuvw", "reduced": "klji", "whole": "defhoxyz"}


@frozen
class Named:
    """A notation and its options. ``None`` operands are ``R``."""

    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    reduce: Mapping[str, str]
    replicate: tuple[str, ...]
    partial: tuple[str, ...]
    nonempty: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        sides = [["R" if dims is None else " ".join(dims) or "()" for dims in s] for s in (self.inputs, self.outputs)]
        return " -> ".join(map(", ".join, sides)).strip()


def name_dims(rows: Iterable[Row], metas: Sequence[Metas]) -> Named:
    """A notation with exactly these rows, for samples of one form. A name gives one row; other rows are written out."""

    def order(row: Row) -> tuple[object, ...]:
        # Rows that shard many dims of one size come first: a name describes them best.
        return (
            -sum(isinstance(p, Shard) for p in row.inputs),
            -sum(isinstance(p, Shard) for p in row.outputs),
            [(p.dim if isinstance(p, Shard) else 99) for p in row.inputs],
            [REDUCE_OPS.index(p.reduce_op) if isinstance(p, Partial) else 9 for p in row.inputs],
            [REDUCE_OPS.index(p.reduce_op) if isinstance(p, Partial) else 9 for p in row.outputs],
        )

    naming = _Naming(metas)
    rest = [row for row in sorted(rows, key=order) if not naming.accept(row)]
    rest = [row for row in rest if any(p not in (REPLICATE, None) for p in (*row.inputs, *row.outputs))]
    for row in rest:
        naming.give_names(row)
    explicit = [naming.words(row) for row in rest]
    naming.name_the_rest()
    return naming.named(tuple(collapsed(words for words in explicit if words is not None)))


@define
class _Naming:
    """A notation under construction. Names are numbers until the end, when each gets a letter.

    ``names`` maps a dim to its name, ``sharded`` has the names that give a row, and ``kind`` maps such a name to the
    reduction of its row, or to ``R``.
    """

    metas: Sequence[Metas]
    names: dict[Place, int] = field(factory=dict, init=False)
    sharded: set[int] = field(factory=set, init=False)
    kind: dict[int, str] = field(factory=dict, init=False)
    nonempty: set[int] = field(factory=set, init=False)
    fresh: Iterator[int] = field(factory=count, init=False)

    def sizes(self, place: Place) -> tuple[int, ...]:
        side, tensor, dim = place
        metas = (m[0 if side == "in" else 1][tensor] for m in self.metas)
        return tuple(-1 if meta is None else meta.shape[dim] for meta in metas)

    def places(self) -> list[Place]:
        first = self.metas[0]
        return [
            (side, t, d)
            for side, metas in zip(("in", "out"), first, strict=True)
            for t, meta in enumerate(metas)
            for d in range(0 if meta is None else meta.ndim)
        ]

    # -- a row as a name --
    def accept(self, row: Row) -> bool:
        """Describe the row by a new name, if its sharded dims have no name yet and it has at most one reduction."""
        inputs, outputs = _sharded("in", row.inputs), _sharded("out", row.outputs)
        others = {_word(p) for p in row.outputs if p is not None and not isinstance(p, Shard)}
        places = [*inputs, *outputs]
        plain = all(isinstance(p, Shard) or p in (REPLICATE, None) for p in row.inputs)
        if not (inputs and plain and len(others) < 2):  # noqa: PLR2004
            return False
        if any(place in self.names for place in places) or len({self.sizes(place) for place in places}) > 1:
            return False
        name = next(self.fresh)
        self.names.update(dict.fromkeys(places, name))
        self.sharded.add(name)
        self.nonempty |= {name} if row.nonempty else set()
        if others:
            self.kind[name] = others.pop()
        return True

    # -- a row written out --
    def give_names(self, row: Row) -> None:
        """Name the dims of an explicit row that have no name yet. Dims of one size in one row share a name."""
        by_size: dict[tuple[int, ...], int] = {}
        for place in _sharded("in", row.inputs):
            sizes = self.sizes(place)
            name = self.names.get(place)
            if name is None:
                name = self.names[place] = by_size.setdefault(sizes, next(self.fresh))
                self.nonempty |= {name} if row.nonempty else set()
            by_size.setdefault(sizes, name)
        for place in _sharded("out", row.outputs):
            name = by_size.get(self.sizes(place))
            if name is not None and name not in self._of(place[:2]):
                self.names.setdefault(place, name)

    def _of(self, tensor: tuple[str, int]) -> set[int]:
        return {name for (side, t, _), name in self.names.items() if (side, t) == tensor}

    def words(self, row: Row) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The entries of an explicit row, dims as ``#number``; ``None`` if a dim cannot be named."""
        of_inputs = {name for place, name in self.names.items() if place[0] == "in"}
        sides: list[tuple[str, ...]] = []
        for side, placements in (("in", row.inputs), ("out", row.outputs)):
            words: list[str] = []
            for t, p in enumerate(placements):
                name = self.names.get((side, t, p.dim)) if isinstance(p, Shard) else None
                if isinstance(p, Shard) and name not in of_inputs:
                    return None
                words.append(_word(p) if name is None else f"#{name}")
            sides.append(tuple(words))
        return sides[0], sides[1]

    # -- the end --
    def name_the_rest(self) -> None:
        """Name the dims that are never sharded: one name for each size. A dim that only a result has gets no name."""
        whole: dict[tuple[int, ...], int] = {}
        for place in self.places():
            sizes = self.sizes(place)
            if place in self.names or set(sizes) == {1}:
                continue
            if place[0] == "in" and sizes not in whole:
                whole[sizes] = next(self.fresh)
            name = whole.get(sizes)
            if name is not None and name not in self._of(place[:2]):
                self.names[place] = name

    def named(self, partial: tuple[str, ...]) -> Named:
        inputs, outputs = (
            tuple(
                None if meta is None else tuple(self.names.get((side, t, d), -1) for d in range(meta.ndim))
                for t, meta in enumerate(metas)
            )
            for side, metas in zip(("in", "out"), self.metas[0], strict=True)
        )
        letters = self._letters(inputs, outputs)
        whole = [name for name in letters if name not in self.sharded]
        if len(inputs) > 1:
            # An operand whose dims are never sharded is R. A single operand stays: its names carry over to the result.
            explicit = {n for n in letters if any(f"#{n} " in f"{text} ".replace(",", " ") for text in partial)}
            named = self.sharded | explicit
            inputs = tuple(dims if not dims or named.intersection(dims) else None for dims in inputs)
        left = {name for dims in (*inputs, *outputs) for name in dims or () if name >= 0}
        texts = [text.replace(",", " ,").split(" ") for text in partial]
        words = [" ".join(letters[int(w[1:])] if w.startswith("#") else w for w in text) for text in texts]
        return Named(
            tuple(_lettered(dims, letters) for dims in inputs),
            tuple(_lettered(dims, letters) for dims in outputs),
            {letters[name]: kind for name, kind in self.kind.items() if name in left},
            tuple(letters[name] for name in whole if any(name in (dims or ()) for dims in inputs)),
            tuple(text.replace(" ,", ",") for text in words),
            tuple(letters[name] for name in sorted(self.nonempty)),
        )

    def _letters(
        self, inputs: Sequence[Sequence[int] | None], outputs: Sequence[Sequence[int] | None]
    ) -> dict[int, str]:
        pools = {role: _letters_of(pool) for role, pool in _POOLS.items()}
        order = dict.fromkeys(name for dims in inputs for name in dims or () if name >= 0)
        in_results = {name for dims in outputs for name in dims or ()}
        everywhere = {name for name in order if all(dims and dims[0] == name for dims in (*inputs, *outputs))}
        # A batch dim is the first dim of all tensors, if some tensor lacks another dim.
        batch = everywhere if any(len(set(order) & set(dims or ())) < len(order) for dims in inputs) else set()
        letters: dict[int, str] = {}
        for name in order:
            if name not in self.sharded:
                is_shared = sum(name in (dims or ()) for dims in inputs) > 1
                role = "reduced" if is_shared and name not in in_results else "whole"
            elif name not in in_results:
                role = "reduced"
            else:
                role = "all" if name in batch else "passes"
            letters[name] = next(pools[role])
        return letters


def _sharded(side: str, placements: Sequence[Placement | None]) -> list[Place]:
    return [(side, t, p.dim) for t, p in enumerate(placements) if isinstance(p, Shard)]


def _word(placement: Placement | None) -> str:
    return placement.reduce_op if isinstance(placement, Partial) else "R"


def _letters_of(pool: str) -> Iterator[str]:
    yield from pool
    for n in count(2):
        yield from (f"{letter}{n}" for letter in pool)


def _lettered(dims: Sequence[int] | None, letters: Mapping[int, str]) -> Operand:
    return None if dims is None else tuple(letters.get(name, "_") for name in dims)


# -- explicit rows -----------------------------------------------------------------------------------------------


def collapsed(rows: Iterable[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    """Explicit rows as texts. Rows that hold for every reduction become one text with ``*``."""
    in_order = list(rows)
    all_rows = set(in_order)
    texts: dict[str, None] = {}
    for inputs, outputs in in_order:
        kinds = {word for word in (*inputs, *outputs) if word in REDUCE_OPS}
        if len(kinds) == 1:
            starred = [tuple("*" if w in kinds else w for w in side) for side in (inputs, outputs)]
            every = [tuple(tuple(k if w == "*" else w for w in side) for side in starred) for k in REDUCE_OPS]
            if all_rows.issuperset(every):
                inputs, outputs = starred  # noqa: PLW2901
        texts[f"{', '.join(inputs)} -> {', '.join(outputs)}".strip()] = None
    return list(texts)


def only_partial(rows: Iterable[Row]) -> list[str]:
    """The rows with a partial tensor and without a shard, as texts. They do not depend on the number of dims."""
    unsharded = [row for row in rows if not any(isinstance(p, Shard) for p in (*row.inputs, *row.outputs))]
    partials = [row for row in unsharded if any(isinstance(p, Partial) for p in (*row.inputs, *row.outputs))]
    kinds = {kind: n for n, kind in enumerate(REDUCE_OPS)}
    words = [(tuple(map(_word, row.inputs)), tuple(map(_word, row.outputs))) for row in partials]
    return collapsed(sorted(words, key=lambda w: ([kinds.get(p, 9) for p in w[0]], w)))


# -- ellipses ----------------------------------------------------------------------------------------------------


def with_ellipsis(named: Named) -> Iterator[Named]:
    """The notation with ``...`` in place of leading dims that all tensors share; the one with the most dims first."""
    tensors = (*named.inputs, *named.outputs)
    in_rows = {word for text in named.partial for word in text.replace(",", " ").split()}
    fixed = {*named.reduce, *named.replicate, *named.nonempty, *in_rows, "_"}
    longest = max((dims for dims in tensors if dims), key=len, default=())
    assert longest is not None
    for n in range(len(longest), 0, -1):
        block = longest[:n]
        if fixed.isdisjoint(block) and all(dims is None or _begins_with_end_of(dims, block) for dims in tensors):
            leads = [sum(name in block for name in dims or ()) for dims in tensors]
            shortened = tuple(
                ("...", *dims[lead:]) if dims is not None and lead else dims
                for dims, lead in zip(tensors, leads, strict=True)
            )
            count = len(named.inputs)
            yield evolve(named, inputs=shortened[:count], outputs=shortened[count:])


def _begins_with_end_of(dims: Sequence[str], block: Sequence[str]) -> bool:
    """Whether the dims that are in the block come first, and are its last ones in its order."""
    lead = [name for name in dims if name in block]
    return list(dims[: len(lead)]) == lead and (not lead or list(block[-len(lead) :]) == lead)
