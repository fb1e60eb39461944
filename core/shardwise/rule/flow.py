"""From named dims to rows: the einop mechanism.

A :class:`Flow` names each dim of every tensor of one call. Each name gives one row: the operands that have the dim are
sharded on it, the others are whole, and an output that lacks it is partial. Explicit rows say what else is legal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Unpack

from attrs import evolve, field, frozen

from shardwise.errors import NotationError, RuleError
from shardwise.kernel.placements import REPLICATE, Placement, Shard, partial, shard
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import Row, Rows
from shardwise.kernel.signature import Call
from shardwise.kernel.spec import TensorMeta
from shardwise.rule.facts import Facts, FactWords, stated

__all__ = ["Factor", "Flow", "Label", "RowNames", "row_names", "split_row"]

Factor = tuple[str, int]
# A dim of one tensor: a name, a compound of (name, size) factors, or None for a dim that is never sharded.
Label = str | tuple[Factor, ...] | None
Dims = Sequence[Label] | None

# Rows of flows that were bound before; all are dropped when there are many.
_bound: dict[tuple[Any, ...], Rows] = {}
_MAX_BOUND = 1024

# Rows by name: a dim, a row text, R, *, or facts.
RowNames = str | Facts | Iterable[str | Facts]


def row_names(names: RowNames) -> tuple[str | Facts, ...]:
    """One name, or several; those of a set in an order that is the same in every process."""
    if isinstance(names, (str, Facts)):
        return (names,)
    return tuple(sorted(names, key=str) if isinstance(names, (set, frozenset)) else names)


def _is_row(name: str | Facts) -> bool:
    """Whether a name of a row says what the row is, so that it need not be described elsewhere."""
    return isinstance(name, Facts) or "->" in name


def _operands(dims: Iterable[Dims]) -> tuple[Dims, ...]:
    return tuple(None if labels is None else tuple(labels) for labels in dims)


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@frozen(init=False)
class Flow:
    """Named dims of the tensors of one call; see the module. ``None`` operands are whole (``R``).

    ``outputs`` with one entry serves every output, as ``inputs`` with one entry serves every operand. ``reduce`` maps
    a name that an output lacks to the reduction of that output. Names in ``replicate`` give no row. Facts
    (``linear="grad_out"``) say which operands may be partial, ``partial`` holds rows that no fact states
    (``"product, product -> product"``, ``"sum, k, k -> sum"``) and, where order matters, facts as values.

    ``lowered`` names the rows that run the rule's lowering: by dim, by row text or fact (which need not stand in
    ``partial`` too), ``R`` for the whole row, ``*`` for every row but the whole one. ``nonempty`` names the dims of
    which every rank needs at least one element.
    """

    inputs: tuple[Dims, ...] = field(converter=_operands)
    outputs: tuple[Dims, ...] = field(converter=_operands)
    reduce: Mapping[str, str]
    replicate: frozenset[str] = field(converter=_names)
    partial: tuple[str | Facts, ...]
    lowered: tuple[str | Facts, ...]
    nonempty: frozenset[str] = field(converter=_names)

    def __init__(
        self,
        inputs: Iterable[Dims],
        outputs: Iterable[Dims],
        *,
        reduce: Mapping[str, str] | None = None,
        replicate: Iterable[str] = (),
        partial: Iterable[str | Facts] = (),
        lowered: RowNames = (),
        nonempty: Iterable[str] = (),
        **facts: Unpack[FactWords],
    ) -> None:
        rows = (*stated(facts), *partial)
        names = row_names(lowered) if lowered else ()
        if names:
            rows += tuple(name for name in names if _is_row(name) and name not in rows)
        self.__attrs_init__(inputs, outputs, reduce or {}, replicate, rows, names, nonempty)

    def bind(self, call: Call) -> Rows:
        """The rows for one call."""
        explicit = tuple(self._explicit_rows(call)) if self.partial else ()
        try:
            key = self._key(call.operands, call.outputs, len(call.out_operands), explicit)
            rows = _bound.get(key)
        except TypeError:  # symbolic sizes have no hash
            return self._bind(call, explicit)
        if rows is None:
            if len(_bound) >= _MAX_BOUND:
                _bound.clear()
            rows = _bound[key] = self._bind(call, explicit)
        return rows

    def _explicit_rows(self, call: Call) -> Iterator[tuple[str, bool]]:
        """The texts of the rows that are not of a dim, facts written out, and whether they run the lowering."""
        for stated_row in self.partial:
            lowered = self._is_lowered(stated_row)
            for text in (stated_row,) if isinstance(stated_row, str) else stated_row.rows(call):
                yield text, lowered

    def _bind(self, call: Call, explicit: tuple[tuple[str, bool], ...]) -> Rows:
        rows = self._fitted(call)._rows(call.operands, explicit)  # noqa: SLF001  # a Flow too
        unique = {(r.inputs, r.outputs): r for r in reversed(rows)}
        legal = [r for r in rows if unique[r.inputs, r.outputs] is r]
        return Rows(tuple(_with_out(len(call.out_operands), row) for row in legal))

    def _key(
        self,
        operands: Sequence[TensorMeta | None],
        outputs: Sequence[TensorMeta | None],
        outs: int,
        explicit: tuple[tuple[str, bool], ...],
    ) -> tuple[Any, ...]:
        """Everything that the rows depend on: of the sizes, which dims are broadcast; all of them where dims have
        factors.
        """
        inputs = _serve(self.inputs, len(operands))
        shapes = [None if meta is None else meta.shape for meta in operands]
        fits: tuple[Any, ...]
        if self._has_factors():
            fits = tuple(shapes)
        else:
            sizes: dict[Label, int] = {None: 1}
            for labels, shape in zip(inputs, shapes, strict=False):
                for label, n in zip(labels or (), shape or (), strict=False):
                    if sizes.get(label, 1) == 1:
                        sizes[label] = n
            fits = tuple(
                None if shape is None else len(shape) if labels is None else _fit(labels, shape, sizes)
                for labels, shape in zip(inputs, shapes, strict=False)
            )
        made = tuple(None if meta is None else meta.ndim for meta in outputs)
        reduce = tuple(self.reduce.items())
        options = (reduce, self.replicate, explicit, self.lowered, self.nonempty)
        return self.inputs, self.outputs, len(operands), made, outs, fits, options

    def _has_factors(self) -> bool:
        return any(
            label is not None and not isinstance(label, str)
            for labels in (*self.inputs, *self.outputs)
            for label in labels or ()
        )

    def _rows(self, operands: Sequence[TensorMeta | None], explicit: Sequence[tuple[str, bool]]) -> list[Row]:
        rows = [row for name in self._sharded_names() if (row := self._dim_row(name, operands)) is not None]
        rows += [row for text, lowered in explicit for row in self._explicit(text, operands, lowered=lowered)]
        return [*rows, self._whole_row(operands)]

    # -- fitting to the call --
    def _fitted(self, call: Call) -> Flow:
        inputs = _serve(self.inputs, len(call.operands))
        outputs = _serve(self.outputs, len(call.outputs))
        for what, dims, metas in (("operand", inputs, call.operands), ("output", outputs, call.outputs)):
            if len(dims) != len(metas):
                raise RuleError(
                    asked=f"apply a rule to {call}",
                    found=f"the rule describes {len(dims)} {what}s and the call has {len(metas)}",
                    do="Name the dims of every tensor argument (lists flattened) and of every tensor result.",
                )
            for i, (labels, meta) in enumerate(zip(dims, metas, strict=True)):
                if labels is not None and meta is not None and len(labels) != meta.ndim:
                    raise RuleError(
                        asked=f"apply a rule to {call}",
                        found=f"the rule names {len(labels)} dims of {what} {i}, which has {meta.ndim}: {meta}",
                        do="Name each dim once.",
                    )
        return evolve(self, inputs=inputs, outputs=outputs)

    def _sharded_names(self) -> list[str]:
        """Names that may be sharded, in order of first appearance in the inputs."""
        found: dict[str, None] = {}
        for labels in self.inputs:
            for label in labels or ():
                found.update(dict.fromkeys(_factor_names(label)))
        return [name for name in found if name not in self.replicate]

    # -- rows --
    def _dim_row(self, name: str, operands: Sequence[TensorMeta | None]) -> Row | None:
        """The row in which ``name`` is sharded, or ``None`` when it may not be."""
        size = self._broadcast_size(name, operands)
        inputs: list[Placement | None] = []
        divides: list[tuple[int, int, int]] = []
        nonempty: list[tuple[int, int]] = []
        for i, (labels, meta) in enumerate(zip(self.inputs, operands, strict=True)):
            at = None if meta is None else _position(labels, meta, name, size)
            if at == _BURIED:
                return None
            if meta is None or at is None:
                inputs.append(None if meta is None else REPLICATE)
                continue
            inputs.append(shard(at))
            if isinstance((labels or ())[at], tuple):
                divides.append((i, at, size))
            if name in self.nonempty:
                nonempty.append((i, at))
        outputs = self._dim_outputs(name)
        if outputs is None or not any(p is not None and p != REPLICATE for p in inputs):
            return None
        if not divides and any(isinstance(label, tuple) for labels in self.outputs for label in _having(labels, name)):
            i = next(i for i, p in enumerate(inputs) if p is not None and p != REPLICATE)
            divides.append((i, inputs[i].dim, size))  # type: ignore[union-attr]
        return Row(tuple(inputs), outputs, f"shard {name}", self._is_lowered(name), tuple(divides), tuple(nonempty))

    def _dim_outputs(self, name: str) -> tuple[Placement | None, ...] | None:
        found: list[Placement | None] = []
        for labels in self.outputs:
            at = _find(labels, name)
            if at == _BURIED:
                return None
            if at is not None:
                found.append(shard(at))
            elif name in self.reduce:
                found.append(REPLICATE if self.reduce[name] == "R" else partial(self.reduce[name]))
            else:
                return None
        return tuple(found)

    def _whole_row(self, operands: Sequence[TensorMeta | None]) -> Row:
        return Row(
            tuple(None if m is None else REPLICATE for m in operands),
            tuple(REPLICATE for _ in self.outputs),
            "R",
            "R" in self.lowered,
        )

    def _explicit(self, text: str, operands: Sequence[TensorMeta | None], *, lowered: bool) -> Iterable[Row]:
        left, right = split_row(text)
        ins, outs = _repeat(left, len(self.inputs), text), _repeat(right, len(self.outputs), text)
        for kind in REDUCE_OPS if "*" in left + right else ("",):
            words = [word.replace("*", kind) for word in ins]
            inputs = tuple(
                None if meta is None else self._entry(word, labels, text, meta, operands)
                for word, labels, meta in zip(words, self.inputs, operands, strict=True)
            )
            if _asks_of_the_absent(words, inputs):
                continue
            outputs = tuple(
                self._entry(word.replace("*", kind), labels, text, None, operands)
                for word, labels in zip(outs, self.outputs, strict=True)
            )
            yield Row(
                inputs,
                outputs,
                text.replace("*", kind),
                lowered,
                nonempty=tuple(
                    (i, placement.dim)
                    for i, (word, placement) in enumerate(zip(words, inputs, strict=True))
                    if word in self.nonempty and isinstance(placement, Shard)
                ),
            )

    def _entry(
        self, word: str, labels: Dims, text: str, meta: TensorMeta | None, operands: Sequence[TensorMeta | None]
    ) -> Placement:
        if word == "R":
            return REPLICATE
        if word in REDUCE_OPS:
            return partial(word)
        size = self._broadcast_size(word, operands)
        at = _find(labels, word) if meta is None else _position(labels, meta, word, size)
        if at is None and meta is not None and _find(labels, word) is not None:
            return REPLICATE  # the operand is broadcast along this dim
        if at is None or at == _BURIED:
            raise NotationError(
                asked=f"read the row {text!r}",
                found=f"{word!r} is neither R, nor a reduction, nor a dim of that tensor",
                do=f"Use R, * or one of {', '.join(REDUCE_OPS)}, or a dim named in the notation.",
                row=text,
            )
        return shard(at)

    def _broadcast_size(self, name: str, operands: Sequence[TensorMeta | None]) -> int:
        """The size of a dim after broadcasting: the one that is not 1 (it may be 0)."""
        sizes = (_size(d, m, name) for d, m in zip(self.inputs, operands, strict=True))
        return next((n for n in sizes if n != 1), 1)

    def _is_lowered(self, name: str | Facts) -> bool:
        return "*" in self.lowered or name in self.lowered


def _asks_of_the_absent(words: Sequence[str], inputs: Sequence[Placement | None]) -> bool:
    """Whether a row asks something of absent operands alone: what it says of the results does not hold without them."""
    asked = any(word != "R" and placement is None for word, placement in zip(words, inputs, strict=True))
    return asked and all(placement in (None, REPLICATE) for placement in inputs)


# A name that stands inside a compound dim behind another factor: its shards are not contiguous there.
_BURIED = -1


def _fit(labels: Sequence[Label], shape: Sequence[int], sizes: Mapping[Label, int]) -> tuple[bool, ...] | int:
    """Per dim, whether it has its name's size; the number of dims where that is not the number of names."""
    if len(labels) != len(shape):
        return len(shape)
    return tuple(label is None or bool(n == sizes[label]) for label, n in zip(labels, shape, strict=True))


def _factor_names(label: Label) -> list[str]:
    if label is None:
        return []
    return [label] if isinstance(label, str) else [name for name, _ in label]


def _having(labels: Dims, name: str) -> list[Label]:
    return [label for label in labels or () if name in _factor_names(label)]


def _find(labels: Dims, name: str) -> int | None:
    """The dim that ``name`` shards: its own, or the compound dim that it leads (factors of size one aside)."""
    for at, label in enumerate(labels or ()):
        if label == name:
            return at
        if isinstance(label, tuple) and name in _factor_names(label):
            leading = next((n for n, size in label if size != 1), None)
            return at if leading == name else _BURIED
    return None


def _position(labels: Dims, meta: TensorMeta, name: str, size: int) -> int | None:
    at = _find(labels, name)
    if at is None or at == _BURIED or isinstance((labels or ())[at], tuple):
        return at
    return None if meta.shape[at] != size else at


def _size(labels: Dims, meta: TensorMeta | None, name: str) -> int:
    """How many elements ``name`` has in one operand (1 when it lacks the dim)."""
    if meta is None:
        return 1
    for label, n in zip(labels or (), meta.shape, strict=labels is not None):
        if label == name:
            return n
        if isinstance(label, tuple):
            sizes = dict(label)
            if name in sizes:
                return sizes[name]
    return 1


def _serve(dims: tuple[Dims, ...], count: int) -> tuple[Dims, ...]:
    return dims * count if len(dims) == 1 and count != 1 else dims


def split_row(text: str) -> tuple[list[str], list[str]]:
    """The words left and right of the arrow of an explicit row."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise NotationError(
            asked=f"read the row {text!r}", found="it has no '->'", do="Write inputs -> outputs, as in 'sum, R -> sum'."
        )
    return _words(left), _words(right)


def _words(side: str) -> list[str]:
    return [w.strip() for w in side.split(",")] if side.strip() else []


def _repeat(words: list[str], count: int, text: str) -> list[str]:
    """Spread a trailing ``...`` (more like the last one) to ``count`` words."""
    if words and words[-1] == "..." and len(words) > 1:
        words = words[:-1] + [words[-2]] * (count - len(words) + 1)
        words = words[:count] if len(words) > count else words
    if len(words) != count:
        raise NotationError(
            asked=f"read the row {text!r}",
            found=f"one side has {len(words)} entries and the call has {count} tensors there",
            do="Give one entry per tensor; a trailing ', ...' repeats the last one.",
            row=text,
        )
    return words


def _with_out(outs: int, row: Row) -> Row:
    """``out=`` tensors lie as the results that they receive."""
    return evolve(row, inputs=row.inputs + row.outputs[:outs]) if outs else row
