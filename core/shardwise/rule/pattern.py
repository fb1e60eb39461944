"""A rule's notation held against schemas: what is checked when a rule is made, and the named dims of one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from shardwise.errors import NotationError, RuleArgumentError, RuleError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.plurals import counted
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.signature import Call, Op, op_name, signature
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.rule.facts import Facts
from shardwise.rule.flow import Flow, Label, split_row
from shardwise.rule.notation import ELLIPSIS, TRAILING, Notation, Operand, parse, parse_operand

__all__ = ["Options", "Pattern", "listed"]

_MAX_FLOWS = 64  # per rule


@frozen
class Options:
    """The options of :func:`shardwise.rule.rule`."""

    reduce: dict[str, str]
    replicate: frozenset[str]
    partial: tuple[str | Facts, ...]
    lowered: tuple[str | Facts, ...]
    nonempty: frozenset[str]
    scattered: frozenset[str] = frozenset()


@frozen
class Pattern:
    """A rule's notation, by position or by argument name, with its options."""

    text: str
    positional: Notation | None
    named: Mapping[str, Operand]
    result: Operand | None
    options: Options
    has_compound: bool = field(init=False)
    _flows: dict[Any, Flow] = field(factory=dict, init=False, repr=False, eq=False)

    @has_compound.default
    def _has_compound(self) -> bool:
        inputs, outputs = self.operands
        return any(isinstance(dim, tuple) for operand in (*inputs, *outputs) for dim in operand.dims or ())

    @classmethod
    def of(cls, notation: str | Mapping[str, str], options: Options) -> Pattern:
        if isinstance(notation, str):
            parsed = parse(notation)
            return cls(str(parsed), parsed, {}, None, options)
        _check_is_notation(notation)
        operands = {names: text for names, text in notation.items() if names != "->"}
        named = {name: parse_operand(text) for names, text in operands.items() for name in names.split()}
        result = notation.get("->")
        first = next(iter(named.values()))
        text = ", ".join(f"{names}: {text}" for names, text in operands.items())
        result_operand = parse_operand(result) if result is not None else first
        return cls(f"{text} -> {result or first}", None, named, result_operand, options)

    @property
    def operands(self) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
        if self.positional is not None:
            return self.positional.inputs, self.positional.outputs
        return tuple(self.named.values()), (self.result,) if self.result is not None else ()

    def check(self, ops: Sequence[Op]) -> None:
        """Raise unless the ops have these operands, every vanishing dim has an option, and options name what exists."""
        for op in ops:
            if self.positional is not None:
                _check_counts(op, self.text, self.positional)
            else:
                _check_names(op, self.named)
        options = self.options
        inputs, outputs = self.operands
        names = {n for operand in inputs for n in operand.names}
        for option in ("reduce", "replicate", "nonempty", "scattered"):
            known = {*names, "*"} if option == "scattered" else names
            unknown = {n for n in getattr(options, option) if n not in known and not n.startswith(ELLIPSIS)}
            if unknown:
                raise self._error(f"{option}= names {listed(unknown)}, which no input has", "Use a dim of the inputs.")
        vanishing = {n for n in names if any(o.dims is not None and n not in o.names for o in outputs)}
        loose = vanishing - set(options.reduce) - options.replicate
        if loose:
            raise self._error(
                f"{listed(loose)} of the inputs is missing in an output",
                "Name it in reduce= (its shards are partial results) or in replicate= (it must be whole).",
            )
        both = options.reduce.keys() & options.replicate
        if both:
            raise self._error(
                f"{listed(both)} is in reduce= and in replicate=",
                "A dim that vanishes is reduced over its shards, or it must be whole.",
            )
        kinds = set(options.reduce.values()) - {*REDUCE_OPS, "R"}
        if kinds:
            raise self._error(f"{listed(kinds)} is not a reduction", f"Use one of {', '.join(REDUCE_OPS)}.")
        new = {n for operand in outputs for n in operand.names} - names
        if new:
            raise self._error(f"the output dim {listed(new)} is in no input", "Write _ for a dim that the op makes.")
        self._check_rows(ops, names)

    def _check_rows(self, ops: Sequence[Op], names: set[str]) -> None:
        """Raise unless written rows fit, facts name operands, and every row that runs the lowering exists."""
        options = self.options
        for row in (*options.partial, *options.lowered):
            if isinstance(row, Facts):
                for op in ops:
                    row.check(op)
            elif "->" in row or row in options.partial:
                self._check_row(row, names)
            elif row not in {*names, "R", "*"} and not row.startswith(ELLIPSIS):
                raise self._error(
                    f"lowering= names the row {row!r}, which the rule does not have",
                    "Name a dim of the inputs, a row with its arrow, a fact, R for the whole row or * for all others.",
                )

    def _check_row(self, text: str, names: set[str]) -> None:
        left, right = split_row(text)
        words = {w for w in left + right if w not in {*REDUCE_OPS, "R", "*", "..."}} - names
        if words:
            raise self._error(
                f"the row {text!r} has {listed(words)}, which is neither a placement nor a dim",
                f"Use R, * or one of {', '.join(REDUCE_OPS)}, or a dim of the notation.",
            )
        counts = tuple(map(len, self.operands)) if self.positional is not None else (len(left), len(right))
        for side, count in zip((left, right), counts, strict=True):
            if side[-1:] != ["..."] and len(side) != count:
                raise self._error(
                    f"the row {text!r} has {counted(len(side), 'entry')} on one side where the notation has {count}",
                    "Give one entry per tensor; a trailing ', ...' repeats the last one.",
                )

    def _error(self, found: str, do: str) -> NotationError:
        return NotationError(asked=f"make the rule {self.text!r}", found=found, do=do, notation=self.text)

    def flow(self, call: Call) -> Flow:
        """The named dims of one call."""
        if self.has_compound:
            return self._labelled(call)  # the sizes of factors depend on the call
        ndims = tuple([None if m is None else len(m.shape) for m in (*call.operands, None, *call.outputs)])
        named = self.positional is None or call.signature.has_lists
        key = (ndims, len(call.outputs), call.operand_names if named else None)
        flow = self._flows.get(key)
        if flow is None:
            if len(self._flows) >= _MAX_FLOWS:
                self._flows.clear()
            flow = self._flows[key] = self._labelled(call)
        return flow

    def _labelled(self, call: Call) -> Flow:
        """A name for every dim of the call's tensors: ellipses written out, compound dims with their sizes."""
        inputs, outputs = self._operands_of(call)
        for what, operands, metas in (("operand", inputs, call.operands), ("result", outputs, call.outputs)):
            if len(operands) != len(metas):
                raise self._error(
                    f"it has {counted(len(operands), what)} and {call} has {len(metas)}",
                    "Write one operand per tensor argument, in schema order, and one per tensor result.",
                )
        described = [*zip(inputs, call.operands, strict=True), *zip(outputs, call.outputs, strict=True)]
        dims_of = [_expanded(call, operand, meta) for operand, meta in described]
        sizes: dict[str, int] = {}
        for dims, (_, meta) in zip(dims_of, described, strict=True):
            for name, n in zip(dims or (), meta.shape if meta is not None and dims is not None else (), strict=False):
                if isinstance(name, str) and sizes.get(name, 1) == 1:
                    sizes[name] = n
        sized = [
            None if dims is None else tuple(_sized(call, d, meta, i, sizes) for i, d in enumerate(dims))
            for dims, (_, meta) in zip(dims_of, described, strict=True)
        ]
        options = self.options
        return Flow(
            sized[: len(inputs)],
            sized[len(inputs) :],
            reduce=options.reduce,
            replicate=options.replicate,
            partial=options.partial,
            lowered=options.lowered,
            nonempty=options.nonempty,
            scattered=options.scattered,
        )

    def _operands_of(self, call: Call) -> tuple[Sequence[Operand], Sequence[Operand]]:
        """What is written of each operand and of each result of a call. A list's operand serves all its tensors."""
        if self.positional is None:
            inputs: Sequence[Operand] = [self.named[name.partition("[")[0]] for name in call.operand_names]
            assert self.result is not None
            return inputs, [self.result] * len(call.outputs)
        inputs, outputs = self.positional.inputs, self.positional.outputs
        names = [a.name for a in call.signature.tensor_args if not a.is_out]
        if len(inputs) == 1:
            inputs *= len(call.operands)
        elif call.signature.has_lists and len(inputs) == len(names):
            written = dict(zip(names, inputs, strict=True))
            inputs = [written[name.partition("[")[0]] for name in call.operand_names]
        return inputs, outputs * len(call.outputs) if len(outputs) == 1 else outputs


def _check_is_notation(notation: Any) -> None:
    """Raise :class:`NotationError` unless it maps names of operands to operands, each name once."""
    text = repr(notation)
    do = 'Write "m k, k n -> m n", or map names of operands to operands: {"self other": "..."}.'
    if not isinstance(notation, Mapping):
        raise NotationError(asked=f"read the notation {text}", found=f"it is {kind_of(notation)}", do=do, notation=text)
    for names, operand in notation.items():
        for value in (names, operand):
            if not isinstance(value, str):
                found = f"{value!r} in it is {kind_of(value)}, and not a text"
                raise NotationError(asked=f"read the notation {text}", found=found, do=do, notation=text)
    words = [name for names in notation for name in names.split() if names != "->"]
    twice = sorted({name for name in words if words.count(name) > 1})
    if twice or not words:
        found = f"it names {twice[0]!r} twice" if twice else "it names no operand"
        raise NotationError(asked=f"read the notation {text}", found=found, do=do, notation=text)


def _check_counts(op: Op, text: str, parsed: Notation) -> None:
    tensors = [a.name for a in signature(op).tensor_args if not a.is_out]
    if len(parsed.inputs) != len(tensors) and not (len(parsed.inputs) == 1 and signature(op).has_lists):
        raise NotationError(
            asked=f"make the rule {text!r} for {op_name(op)}",
            found=f"it has {counted(len(parsed.inputs), 'input')}, the op "
            f"{counted(len(tensors), 'tensor argument')}: {listed(tensors)}",
            do="Write one operand per tensor argument, in schema order.",
            op=op_name(op),
        )
    results = [r for r in signature(op).results if r.is_tensor]
    if len(parsed.outputs) not in (1, len(results)) and not any(r.is_list for r in results) and results:
        raise NotationError(
            asked=f"make the rule {text!r} for {op_name(op)}",
            found=f"it has {counted(len(parsed.outputs), 'output')} and the op has "
            f"{counted(len(results), 'tensor result')}",
            do="Write one operand per tensor result, or a single one that serves all.",
            op=op_name(op),
        )


def _check_names(op: Op, named: Mapping[str, Operand]) -> None:
    known = [a.name for a in signature(op).tensor_args if not a.is_out]
    unknown, missing = [n for n in named if n not in known], [n for n in known if n not in named]
    if unknown or missing:
        what = f"it names {listed(unknown)}" if unknown else f"it says nothing of {listed(missing)}"
        raise RuleArgumentError(
            asked=f"make a rule for {op_name(op)}",
            found=f"{what}, and the op's tensor arguments are {listed(known)}",
            do="Name exactly the op's tensor arguments (R for one that is whole).",
            op=op_name(op),
            argument=(unknown or missing)[0],
        )


def _expanded(call: Call, operand: Operand, meta: TensorMeta | None) -> tuple[Any, ...] | None:
    if operand.dims is None or meta is None:
        return None
    dims: list[Any] = list(operand.dims)
    if TRAILING in dims:
        extra = meta.ndim - (len(dims) - 1)
        dims[-1:] = [None] * extra
    elif ELLIPSIS in dims:
        at, extra = dims.index(ELLIPSIS), meta.ndim - (len(dims) - 1)
        dims[at : at + 1] = [f"{ELLIPSIS}{i}" for i in range(extra, 0, -1)]
    else:
        extra = meta.ndim - len(dims)
        dims = dims[-meta.ndim :] if meta.ndim else []
    if (extra < 0 and (operand.has_ellipsis or TRAILING in operand.dims)) or len(dims) != meta.ndim:
        raise RuleError(
            asked=f"apply a rule to {call}",
            found=f"the rule writes {str(operand)!r} for a tensor of {counted(meta.ndim, 'dim')}: {meta}",
            do="Name each dim once, or use '...' for any number of leading dims.",
        )
    return tuple(None if d in ("1", "_") else d for d in dims)


def _sized(call: Call, dim: Any, meta: TensorMeta | None, at: int, sizes: Mapping[str, int]) -> Label:
    if not isinstance(dim, tuple):
        return dim if dim is None else str(dim)
    total = 1 if meta is None else meta.shape[at]
    unknown = [name for name in dim if name not in sizes]
    known = 1
    for name in dim:
        known *= sizes.get(name, 1)
    if len(unknown) > 1 or (not unknown and known != total) or (unknown and known and total % known):
        raise RuleError(
            asked=f"apply a rule to {call}",
            found=f"the compound dim ({' '.join(dim)}) of size {total} does not follow from {dict(sizes)}",
            do="All factors but one must be dims of other tensors of the call.",
        )
    filled = dict.fromkeys(unknown, total // known if known else 0)
    return tuple((name, filled.get(name, sizes.get(name, 1))) for name in dim)


def listed(names: Iterable[str]) -> str:
    """Names in quotes, sets in order, for messages."""
    return ", ".join(repr(n) for n in (sorted(names) if isinstance(names, (set, frozenset)) else names))
