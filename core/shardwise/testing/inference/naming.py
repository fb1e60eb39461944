"""From rows to named dims: which dims of which tensors are sharded together, and which rows must be said one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count

from attrs import define, evolve, field, frozen

from shardwise.kernel.placements import REPLICATE, Partial, Placement, Shard
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import Row
from shardwise.kernel.spec import TensorMeta

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
        left, right = (", ".join(map(_operand_text, side)) for side in (self.inputs, self.outputs))
        return f"{left} -> {right}".strip()


def _operand_text(dims: Operand) -> str:
    return "R" if dims is None else " ".join(dims) or "()"


def name_dims(rows: Iterable[Row], metas: Sequence[Metas]) -> Named:
    """The named dims by which rows read, for samples of one form; one row per name, the others written out."""
    naming = _Naming(metas)
    rest = [row for row in _preferred(rows) if not naming.accept(row)]
    rest = [row for row in rest if any(p not in (REPLICATE, None) for p in (*row.inputs, *row.outputs))]
    for row in rest:
        naming.give_names(row)
    said = [naming.words(row) for row in rest]
    naming.name_the_rest()
    return naming.named(
        tuple(collapsed(words for words in said if words is not None)),
    )


def _preferred(rows: Iterable[Row]) -> list[Row]:
    """Rows that shard many dims of one size come first: a name describes them best."""
    return sorted(
        rows,
        key=lambda row: (
            -sum(isinstance(p, Shard) for p in row.inputs),
            -sum(isinstance(p, Shard) for p in row.outputs),
            [(p.dim if isinstance(p, Shard) else 99) for p in row.inputs],
            [REDUCE_OPS.index(p.reduce_op) if isinstance(p, Partial) else 9 for p in row.inputs],
            [REDUCE_OPS.index(p.reduce_op) if isinstance(p, Partial) else 9 for p in row.outputs],
        ),
    )


@define
class _Naming:
    """Names in the making: numbers for now. ``kind`` maps a number to the reduction of its row, or ``R``."""

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
        """Names for the dims of an explicit row that have none; dims of one size in one row share theirs."""
        known: dict[tuple[int, ...], int] = {}
        for place in _sharded("in", row.inputs):
            sizes = self.sizes(place)
            name = self.names.get(place)
            if name is None:
                name = self.names[place] = known.setdefault(sizes, next(self.fresh))
                self.nonempty |= {name} if row.nonempty else set()
            known.setdefault(sizes, name)
        for place in _sharded("out", row.outputs):
            name = known.get(self.sizes(place))
            if name is not None and name not in self._of(place[:2]):
                self.names.setdefault(place, name)

    def _of(self, tensor: tuple[str, int]) -> set[int]:
        return {name for (side, t, _), name in self.names.items() if (side, t) == tensor}

    def words(self, row: Row) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
        """The entries of an explicit row, dims as ``#number``; ``None`` when a dim cannot be named."""
        known = {name for place, name in self.names.items() if place[0] == "in"}
        sides: list[tuple[str, ...]] = []
        for side, placements in (("in", row.inputs), ("out", row.outputs)):
            words: list[str] = []
            for t, p in enumerate(placements):
                name = self.names.get((side, t, p.dim)) if isinstance(p, Shard) else None
                if isinstance(p, Shard) and name not in known:
                    return None
                words.append(_word(p) if name is None else f"#{name}")
            sides.append(tuple(words))
        return sides[0], sides[1]

    # -- the end --
    def name_the_rest(self) -> None:
        """Dims that are never sharded: one name for those of one size, none for dims that the op makes."""
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
        inputs, outputs = (self._dims(side) for side in ("in", "out"))
        letters = self._letters(inputs, outputs)
        whole = [name for name in letters if name not in self.sharded]
        explicit = {name for name in letters if any(f"#{name} " in f"{text} ".replace(",", " ") for text in partial)}
        inputs = tuple(self._or_whole(dims, explicit) for dims in inputs)
        left = {name for dims in (*inputs, *outputs) for name in dims or () if name >= 0}
        return Named(
            tuple(_lettered(dims, letters) for dims in inputs),
            tuple(_lettered(dims, letters) for dims in outputs),
            {letters[name]: kind for name, kind in self.kind.items() if name in left},
            tuple(letters[name] for name in whole if any(name in (dims or ()) for dims in inputs)),
            tuple(_with_letters(text, letters) for text in partial),
            tuple(letters[name] for name in sorted(self.nonempty)),
        )

    def _dims(self, side: str) -> tuple[tuple[int, ...] | None, ...]:
        metas = self.metas[0][0 if side == "in" else 1]
        return tuple(
            None if meta is None else tuple(self.names.get((side, t, d), -1) for d in range(meta.ndim))
            for t, meta in enumerate(metas)
        )

    def _or_whole(self, dims: tuple[int, ...] | None, explicit: set[int]) -> tuple[int, ...] | None:
        """``None`` for an operand that has dims and never has one sharded."""
        if not dims or any(name in self.sharded or name in explicit for name in dims):
            return dims
        # Where it is the only operand, its names carry over to the result.
        return dims if len(self.metas[0][0]) == 1 else None

    def _letters(
        self, inputs: Sequence[Sequence[int] | None], outputs: Sequence[Sequence[int] | None]
    ) -> dict[int, str]:
        pools = {role: _letters_of(pool) for role, pool in _POOLS.items()}
        order = dict.fromkeys(name for dims in inputs for name in dims or () if name >= 0)
        made = {name for dims in outputs for name in dims or ()}
        everywhere = {name for name in order if all(dims and dims[0] == name for dims in (*inputs, *outputs))}
        # A batch dim is one that all tensors have first, beside others that only some have.
        batch = everywhere if any(len(set(order) & set(dims or ())) < len(order) for dims in inputs) else set()
        letters: dict[int, str] = {}
        for name in order:
            if name not in self.sharded:
                role = "whole" if name in made or not self._is_shared(name, inputs) else "reduced"
            elif name not in made:
                role = "reduced"
            else:
                role = "all" if name in batch else "passes"
            letters[name] = next(pools[role])
        return letters

    def _is_shared(self, name: int, inputs: Sequence[Sequence[int] | None]) -> bool:
        return sum(name in (dims or ()) for dims in inputs) > 1


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


def _with_letters(text: str, letters: Mapping[int, str]) -> str:
    words = text.replace(",", " ,").split(" ")
    return " ".join(letters[int(w[1:])] if w.startswith("#") else w for w in words).replace(" ,", ",")


# -- explicit rows -----------------------------------------------------------------------------------------------


def collapsed(rows: Iterable[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[str]:
    """Explicit rows as texts, a ``*`` for rows that are there for every kind, in the order of the first of each."""
    listed = list(rows)
    known = set(listed)
    texts: dict[str, None] = {}
    for inputs, outputs in listed:
        kinds = {word for word in (*inputs, *outputs) if word in REDUCE_OPS}
        if len(kinds) == 1:
            starred = [tuple("*" if w in kinds else w for w in side) for side in (inputs, outputs)]
            every = [tuple(tuple(k if w == "*" else w for w in side) for side in starred) for k in REDUCE_OPS]
            if known.issuperset(every):
                inputs, outputs = starred  # noqa: PLW2901
        texts[f"{', '.join(inputs)} -> {', '.join(outputs)}".strip()] = None
    return list(texts)


def only_partial(rows: Iterable[Row]) -> list[str]:
    """The rows without a shard that have a partial operand, as texts: they do not depend on the number of dims."""
    plain = [row for row in rows if not any(isinstance(p, Shard) for p in (*row.inputs, *row.outputs))]
    partials = [row for row in plain if any(isinstance(p, Partial) for p in (*row.inputs, *row.outputs))]
    kinds = {kind: n for n, kind in enumerate(REDUCE_OPS)}
    words = [(tuple(map(_word, row.inputs)), tuple(map(_word, row.outputs))) for row in partials]
    return collapsed(sorted(words, key=lambda w: ([kinds.get(p, 9) for p in w[0]], w)))


# -- ellipses ----------------------------------------------------------------------------------------------------


def with_ellipsis(named: Named) -> Iterator[Named]:
    """The same with ``...`` for leading dims, the most first, where every tensor has the same ones."""
    tensors = (*named.inputs, *named.outputs)
    spoken = {word for text in named.partial for word in text.replace(",", " ").split()}
    fixed = {*named.reduce, *named.replicate, *named.nonempty, *spoken, "_"}
    longest = max((dims for dims in tensors if dims), key=len, default=())
    assert longest is not None
    for n in range(len(longest), 0, -1):
        block = longest[:n]
        if fixed.isdisjoint(block) and all(dims is None or _stands_alike(dims, block) for dims in tensors):
            inputs, outputs = (
                tuple(None if dims is None else _shortened(dims, block) for dims in side)
                for side in (named.inputs, named.outputs)
            )
            yield evolve(named, inputs=inputs, outputs=outputs)


def _stands_alike(dims: Sequence[str], block: Sequence[str]) -> bool:
    lead = [name for name in dims if name in block]
    return list(dims[: len(lead)]) == lead and (not lead or list(block[-len(lead) :]) == lead)


def _shortened(dims: tuple[str, ...], block: Sequence[str]) -> tuple[str, ...]:
    lead = sum(name in block for name in dims)
    return ("...", *dims[lead:]) if lead else dims
