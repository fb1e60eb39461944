"""From named dims to rows: the einop mechanism.

A :class:`Flow` names each dim of every tensor of one call. Each name gives one row: the operands that have the dim are
sharded on it, the others are whole, and a result that lacks it is partial. Explicit rows say what else is legal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, Unpack

from attrs import evolve, field, frozen

from shardwise.errors import NotationError, RuleError
from shardwise.kernel.placements import REPLICATE, Placement, Shard, partial, shard, shard_dim, strided_shard
from shardwise.kernel.plurals import counted
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.rule import Row, Rows
from shardwise.kernel.signature import Call
from shardwise.kernel.symbols import is_symbolic
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.rule.facts import Facts, FactWords, stated

__all__ = ["Factor", "Flow", "Label", "RowNames", "row_names", "split_row"]

Factor = tuple[str, int]
# A dim of one tensor: a name, a compound of (name, size) factors, or None for a dim that is never sharded.
Label = str | tuple[Factor, ...] | None
Dims = Sequence[Label] | None

# Rows of flows by all that they depend on. A full table is emptied.
_bound: dict[tuple[Any, ...], Rows] = {}
_MAX_BOUND = 1024
# A number for each flow by all that it says. No number is used twice, so the table may be emptied, too.
_numbers: dict[tuple[Any, ...], int] = {}
_unused = count()

# Rows by name: a dim, a row text, R, *, or facts.
RowNames = str | Facts | Iterable[str | Facts]


def row_names(names: RowNames) -> tuple[str | Facts, ...]:
    """One name, or several; those of a set in an order that is the same in every process."""
    if isinstance(names, (str, Facts)):
        return (names,)
    return tuple(sorted(names, key=str) if isinstance(names, (set, frozenset)) else names)


def _operands(dims: Iterable[Dims]) -> tuple[Dims, ...]:
    return tuple([None if labels is None else tuple(labels) for labels in dims])


def _names(names: Iterable[str]) -> frozenset[str]:
    return frozenset(names)


@frozen(init=False)
class Flow:
    """Named dims of the tensors of one call; see the module. ``None`` operands are whole (``R``).

    One entry of ``inputs`` serves every operand, and one of ``outputs`` every result. ``reduce`` maps a name that a
    result lacks to the reduction of that result. Names in ``replicate`` give no row. Facts (``linear="grad_out"``) say
    which operands may be partial. ``partial`` holds the rows that no fact states (``"product, product -> product"``,
    ``"sum, k, k -> sum"``) and, where order matters, facts as values.

    ``lowered`` names the rows that run the rule's lowering: by dim, by row text or by fact (which need not stand in
    ``partial`` too), ``R`` for the whole row, ``*`` for every row but the whole one. ``nonempty`` names the dims of
    which every rank needs at least one element. ``strided`` says that a dim behind others in a compound dim has a row,
    too, by a strided shard of that dim: what the op does to a shard there does not depend on the sizes of the others.
    ``scattered`` names the dims (``*`` for all) along which the lowering does not ask where a shard starts, so that
    they may have strided shards where it runs. Where it does not run, all may.
    """

    inputs: tuple[Dims, ...] = field(converter=_operands)
    outputs: tuple[Dims, ...] = field(converter=_operands)
    reduce: Mapping[str, str]
    replicate: frozenset[str] = field(converter=_names)
    partial: tuple[str | Facts, ...]
    lowered: tuple[str | Facts, ...]
    nonempty: frozenset[str] = field(converter=_names)
    strided: bool
    scattered: frozenset[str] = field(converter=_names)

    def __init__(  # noqa: PLR0913  # keyword-only options of one value
        self,
        inputs: Iterable[Dims],
        outputs: Iterable[Dims],
        *,
        reduce: Mapping[str, str] | None = None,
        replicate: Iterable[str] = (),
        partial: Iterable[str | Facts] = (),
        lowered: RowNames = (),
        nonempty: Iterable[str] = (),
        strided: bool = False,
        scattered: Iterable[str] = (),
        **facts: Unpack[FactWords],
    ) -> None:
        rows = (*stated(facts), *partial)
        names = row_names(lowered) if lowered else ()
        # A fact or a row text is described by its name; a dim, R and * name rows that are described elsewhere.
        rows += tuple([n for n in names if (isinstance(n, Facts) or "->" in n) and n not in rows])
        self.__attrs_init__(inputs, outputs, reduce or {}, replicate, rows, names, nonempty, strided, scattered)

    def bind(self, call: Call) -> Rows:
        """The rows for one call."""
        explicit: list[tuple[str, bool]] = []
        for row in self.partial:
            lowered = self._is_lowered(row)
            explicit += [(text, lowered) for text in ((row,) if isinstance(row, str) else row.rows(call))]
        key: tuple[Any, ...] | None
        try:
            key = self._number, tuple(explicit), *self._key(call)
            rows = _bound.get(key)
        except TypeError:  # symbolic sizes have no hash
            key = rows = None
        if rows is None:
            rows = self._fitted(call)._rows(call, explicit)  # noqa: SLF001  # a Flow too
            if key is not None:
                if len(_bound) >= _MAX_BOUND:
                    _bound.clear()
                _bound[key] = rows
        return rows

    @cached_property
    def _number(self) -> int:
        """A number that equal flows share. A flow that many calls have in common is hashed once."""
        options = tuple(self.reduce.items()), self.replicate, self.lowered, self.nonempty, self.strided, self.scattered
        key = self.inputs, self.outputs, options
        number = _numbers.get(key)
        if number is None:
            if len(_numbers) >= _MAX_BOUND:
                _numbers.clear()
            number = _numbers[key] = next(_unused)
        return number

    @cached_property
    def _has_factors(self) -> bool:
        return any(tuple in map(type, labels) for labels in (*self.inputs, *self.outputs) if labels)

    def _key(self, call: Call) -> tuple[Any, ...]:
        """What the rows depend on in a call. Of the sizes that is only which dims are broadcast, unless dims have
        factors.
        """
        operands = call.operands
        inputs = _serve(self.inputs, len(operands))
        fits: list[Any] = [None if meta is None else len(meta.shape) for meta in operands]
        if self._has_factors:
            fits = [None if meta is None else meta.shape for meta in operands]
        else:
            sizes: dict[Label, int] = {}
            is_broadcast = False
            for labels, meta in zip(inputs, operands, strict=False):
                if labels is None or meta is None:
                    continue
                for label, n in zip(labels, meta.shape, strict=False):
                    if label is not None and sizes.setdefault(label, n) != n:
                        is_broadcast = True
                        if sizes[label] == 1:
                            sizes[label] = n
            if is_broadcast:
                for i, (labels, meta) in enumerate(zip(inputs, operands, strict=False)):
                    if labels is not None and meta is not None and len(labels) == len(meta.shape):
                        dims = zip(labels, meta.shape, strict=True)
                        fits[i] = tuple([label is None or bool(n == sizes[label]) for label, n in dims])
        ndims = tuple([None if meta is None else len(meta.shape) for meta in call.outputs])
        return tuple(fits), ndims, len(call.out_operands)

    def _fitted(self, call: Call) -> Flow:
        """The flow with one entry per operand and result, checked against their numbers of dims."""
        inputs = _serve(self.inputs, len(call.operands))
        outputs = _serve(self.outputs, len(call.outputs))
        for what, dims, metas in (("operand", inputs, call.operands), ("result", outputs, call.outputs)):
            if len(dims) != len(metas):
                raise RuleError(
                    asked=f"apply a rule to {call}",
                    found=f"the rule describes {counted(len(dims), what)} and the call has {len(metas)}",
                    do="Name the dims of every tensor argument (lists flattened) and of every tensor result.",
                )
            for i, (labels, meta) in enumerate(zip(dims, metas, strict=True)):
                if labels is not None and meta is not None and len(labels) != meta.ndim:
                    raise RuleError(
                        asked=f"apply a rule to {call}",
                        found=f"the rule names {counted(len(labels), 'dim')} of {what} {i}, "
                        f"which has {meta.ndim}: {meta}",
                        do="Name each dim once.",
                    )
        return evolve(self, inputs=inputs, outputs=outputs)

    def _rows(self, call: Call, explicit: Iterable[tuple[str, bool]]) -> Rows:
        """Rows of dims in the order in which the inputs first have them, explicit rows, the whole row."""
        operands = call.operands
        names = dict.fromkeys(n for labels in self.inputs for label in labels or () for n in _factor_names(label))
        rows = [self._dim_row(name, operands) for name in names if name not in self.replicate]
        rows += [row for text, lowered in explicit for row in self._explicit_rows(text, operands, lowered=lowered)]
        whole = tuple(None if meta is None else REPLICATE for meta in operands)
        rows.append(Row(whole, (REPLICATE,) * len(self.outputs), "R", "R" in self.lowered))
        legal: dict[Any, Row] = {}
        for row in rows:
            if row is not None:
                legal.setdefault((row.inputs, row.outputs), row)
        outs = len(call.out_operands)
        # `out=` tensors lie as the results that they receive.
        return Rows(tuple(evolve(r, inputs=r.inputs + r.outputs[:outs]) if outs else r for r in legal.values()))

    def _dim_row(self, name: str, operands: Sequence[TensorMeta | None]) -> Row | None:
        """The row in which ``name`` is sharded, or ``None`` when it may not be."""
        size = self._broadcast_size(name, operands)
        inputs: list[Placement | None] = []
        divides: list[tuple[int, int, int]] = []
        nonempty: list[tuple[int, int]] = []
        for i, (labels, meta) in enumerate(zip(self.inputs, operands, strict=True)):
            at = None if meta is None else _position(labels, meta, name, size)
            if meta is None or at is None:
                inputs.append(None if meta is None else REPLICATE)
                continue
            if at == _BURIED:
                at, behind = _inside(labels, name)
                if not self.strided or is_symbolic((behind,)):
                    return None
                inputs.append(strided_shard(at, behind))
            else:
                inputs.append(shard(at))
            if isinstance((labels or ())[at], tuple):
                divides.append((i, at, size))
            if name in self.nonempty:
                nonempty.append((i, at))
        outputs: list[Placement] = []
        for labels in self.outputs:
            at = _find(labels, name)
            if at == _BURIED:
                at, behind = _inside(labels, name)
                if not self.strided or is_symbolic((behind,)):
                    return None
                outputs.append(strided_shard(at, behind))
            elif at is None and name not in self.reduce:
                return None
            elif at is not None:
                outputs.append(shard(at))
            else:
                outputs.append(REPLICATE if self.reduce[name] == "R" else partial(self.reduce[name]))
        sharded = next(((i, d) for i, p in enumerate(inputs) if (d := shard_dim(p)) is not None), None)
        if sharded is None:
            return None
        factored = [label for labels in self.outputs for label in labels or () if isinstance(label, tuple)]
        if not divides and any(name in _factor_names(label) for label in factored):
            divides.append((*sharded, size))
        lowered = self._is_lowered(name)
        scattered = self._is_scattered(name)
        return Row(tuple(inputs), tuple(outputs), f"shard {name}", lowered, tuple(divides), tuple(nonempty), scattered)

    def _explicit_rows(self, text: str, operands: Sequence[TensorMeta | None], *, lowered: bool) -> Iterator[Row]:
        left, right = split_row(text)
        ins, outs = _repeat(left, len(self.inputs), text), _repeat(right, len(self.outputs), text)
        for kind in REDUCE_OPS if "*" in left + right else ("",):
            words = [word.replace("*", kind) for word in ins]
            inputs = tuple(
                None if meta is None else self._entry(word, labels, text, meta, operands)
                for word, labels, meta in zip(words, self.inputs, operands, strict=True)
            )
            asked = any(word != "R" and placement is None for word, placement in zip(words, inputs, strict=True))
            if asked and all(placement in (None, REPLICATE) for placement in inputs):
                continue  # all that it says is of absent operands; what it says of the results does not hold without
            outputs = tuple(
                self._entry(word.replace("*", kind), labels, text, None, operands)
                for word, labels in zip(outs, self.outputs, strict=True)
            )
            nonempty = tuple(
                (i, placement.dim)
                for i, (word, placement) in enumerate(zip(words, inputs, strict=True))
                if word in self.nonempty and isinstance(placement, Shard)
            )
            sharded = {word for word, p in zip(words, inputs, strict=True) if isinstance(p, Shard)}
            scattered = all(map(self._is_scattered, sharded))
            yield Row(inputs, outputs, text.replace("*", kind), lowered, nonempty=nonempty, scattered=scattered)

    def _entry(
        self, word: str, labels: Dims, text: str, meta: TensorMeta | None, operands: Sequence[TensorMeta | None]
    ) -> Placement:
        """What one word of an explicit row says of a tensor; ``meta`` is ``None`` for a result."""
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
        """The size of a dim after broadcasting: the first of its sizes that is not 1 (it may be 0)."""
        for labels, meta in zip(self.inputs, operands, strict=True):
            for label, n in zip(labels or (), () if meta is None else meta.shape, strict=False):
                sizes = dict(label) if isinstance(label, tuple) else {label: n}
                if sizes.get(name, 1) != 1:
                    return sizes[name]
        return 1

    def _is_scattered(self, name: str) -> bool:
        return "*" in self.scattered or name in self.scattered or (name.startswith("...") and "..." in self.scattered)

    def _is_lowered(self, name: str | Facts) -> bool:
        return "*" in self.lowered or name in self.lowered


# A name that stands inside a compound dim behind another factor: its shards are not contiguous there (see `_inside`).
_BURIED = -1


def _factor_names(label: Label) -> list[str]:
    if label is None:
        return []
    return [label] if isinstance(label, str) else [name for name, _ in label]


def _find(labels: Dims, name: str) -> int | None:
    """The dim that ``name`` shards: its own, or the compound dim that it leads (factors of size one aside)."""
    for at, label in enumerate(labels or ()):
        if label == name:
            return at
        if isinstance(label, tuple) and name in _factor_names(label):
            leading = next((n for n, size in label if size != 1), None)
            return at if leading == name else _BURIED
    return None


def _inside(labels: Dims, name: str) -> tuple[int, int]:
    """The compound dim in which ``name`` stands, and the product of the factors in front of it."""
    for at, label in enumerate(labels or ()):
        if isinstance(label, tuple) and name in (names := _factor_names(label)):
            return at, math.prod(n for _, n in label[: names.index(name)])
    raise KeyError(name)


def _position(labels: Dims, meta: TensorMeta, name: str, size: int) -> int | None:
    """The dim of an operand that ``name`` shards; ``None`` where the operand is broadcast along it."""
    at = _find(labels, name)
    if at is None or at == _BURIED or isinstance((labels or ())[at], tuple):
        return at
    return None if meta.shape[at] != size else at


def _serve(dims: tuple[Dims, ...], count: int) -> tuple[Dims, ...]:
    return dims * count if len(dims) == 1 and count != 1 else dims


def split_row(text: str) -> tuple[list[str], list[str]]:
    """The words left and right of the arrow of an explicit row."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise NotationError(
            asked=f"read the row {text!r}", found="it has no '->'", do="Write inputs -> outputs, as in 'sum, R -> sum'."
        )
    inputs, outputs = ([w.strip() for w in side.split(",")] if side.strip() else [] for side in (left, right))
    return inputs, outputs


def _repeat(words: list[str], count: int, text: str) -> list[str]:
    """Spread a trailing ``...`` (more like the last one) to ``count`` words."""
    if words and words[-1] == "..." and len(words) > 1:
        words = words[:-1] + [words[-2]] * (count - len(words) + 1)
        words = words[:count] if len(words) > count else words
    if len(words) != count:
        raise NotationError(
            asked=f"read the row {text!r}",
            found=f"one side has {counted(len(words), 'entry')} and the call has {counted(count, 'tensor')} there",
            do="Give one entry per tensor; a trailing ', ...' repeats the last one.",
            row=text,
        )
    return words
