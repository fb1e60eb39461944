"""A rule's notation held against schemas: what is checked when a rule is made, and the named dims of one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from shardwise.errors import NotationError, RuleArgumentError, RuleError
from shardwise.kernel.reductions import REDUCE_OPS
from shardwise.kernel.signature import Call, Kind, Op, op_name, signature
from shardwise.kernel.spec import TensorMeta
from shardwise.rule.facts import Facts
from shardwise.rule.flow import Flow, Label, split_row
from shardwise.rule.notation import ELLIPSIS, TRAILING, Notation, Operand, parse, parse_operand

__all__ = ["Options", "Pattern", "labelled", "listed"]

_MAX_FLOWS = 64  # per rule


@frozen
class Options:
    """The options of :func:`shardwise.rule.rule`."""

    reduce: dict[str, str]
    replicate: frozenset[str]
    partial: tuple[str | Facts, ...]
    lowered: tuple[str | Facts, ...]
    nonempty: frozenset[str]


@frozen
class Pattern:
    """A rule's notation, by position or by argument name, checked against the schemas of its ops."""

    text: str
    positional: Notation | None
    named: Mapping[str, Operand]
    result: Operand | None
    has_compound: bool = field(init=False)
    _flows: dict[Any, tuple[Flow, Options]] = field(factory=dict, init=False, repr=False, eq=False)

    @has_compound.default
    def _has_compound(self) -> bool:
        inputs, outputs = self.operands
        return any(isinstance(dim, tuple) for operand in (*inputs, *outputs) for dim in operand.dims or ())

    @classmethod
    def of(cls, ops: Sequence[Op], notation: str | Mapping[str, str]) -> Pattern:
        if isinstance(notation, str):
            parsed = parse(notation)
            for op in ops:
                _check_counts(op, notation, parsed)
            return cls(str(parsed), parsed, {}, None)
        named = {
            name: parse_operand(text) for names, text in notation.items() if names != "->" for name in names.split()
        }
        for op in ops:
            _check_names(op, named)
        result = notation.get("->")
        first = next(iter(named.values()))
        text = ", ".join(f"{names}: {text}" for names, text in notation.items() if names != "->")
        return cls(f"{text} -> {result or first}", None, named, parse_operand(result) if result is not None else first)

    @property
    def operands(self) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
        if self.positional is not None:
            return self.positional.inputs, self.positional.outputs
        return tuple(self.named.values()), (self.result,) if self.result is not None else ()

    def check(self, ops: Sequence[Op], options: Options) -> None:
        """Every vanishing dim is accounted for, and every option speaks of something that is there."""
        inputs, outputs = self.operands
        names = {n for o in inputs for n in o.names}
        made = {n for o in outputs for n in o.names}
        vanishing = {n for n in names if any(o.dims is not None and n not in o.names for o in outputs)}
        loose = vanishing - set(options.reduce) - options.replicate if outputs else set()
        if loose:
            raise self._error(
                f"{listed(loose)} of the inputs is missing in an output",
                "Name it in reduce= (its shards are partial results) or in replicate= (it must be whole).",
            )
        for what, given in (
            ("reduce", set(options.reduce)),
            ("replicate", options.replicate),
            ("nonempty", options.nonempty),
        ):
            unknown = {n for n in given if n not in names and not n.startswith(ELLIPSIS)}
            if unknown:
                raise self._error(f"{what}= names {listed(unknown)}, which no input has", "Use a dim of the inputs.")
        kinds = set(options.reduce.values()) - {*REDUCE_OPS, "R"}
        if kinds:
            raise self._error(f"{listed(kinds)} is no reduction", f"Use one of {', '.join(REDUCE_OPS)}.")
        if made - names:
            raise self._error(
                f"the output dim {listed(made - names)} is in no input", "Write _ for a dim made by the op."
            )
        self._check_rows(ops, options, names)

    def _check_rows(self, ops: Sequence[Op], options: Options, names: set[str]) -> None:
        """Every row that is written out fits, every fact names operands, and what runs the lowering is a row."""
        for row in (*options.partial, *options.lowered):
            if isinstance(row, Facts):
                for op in ops:
                    row.check(op)
            elif "->" in row or row in options.partial:
                self._check_row(row, names)
            elif row not in {*names, "R", "*"} and not row.startswith(ELLIPSIS):
                raise self._error(
                    f"lowering= names the row {row!r}, and no row is called so",
                    "Name a dim of the inputs, a row with its arrow, a fact, R for the whole row or * for all others.",
                )

    def _check_row(self, text: str, names: set[str]) -> None:
        left, right = split_row(text)
        words = {w for w in left + right if w not in {*REDUCE_OPS, "R", "*", "..."}} - names
        if words:
            raise self._error(
                f"the row {text!r} has {listed(words)}, which is no placement and no dim",
                f"Use R, * or one of {', '.join(REDUCE_OPS)}, or a dim of the notation.",
            )
        counts = tuple(map(len, self.operands)) if self.positional is not None else (len(left), len(right))
        for side, count in zip((left, right), counts, strict=True):
            if side[-1:] != ["..."] and len(side) != count:
                raise self._error(
                    f"the row {text!r} has {len(side)} entries on one side where the notation has {count}",
                    "Give one entry per tensor; a trailing ', ...' repeats the last one.",
                )

    def _error(self, found: str, do: str) -> NotationError:
        return NotationError(asked=f"make the rule {self.text!r}", found=found, do=do, notation=self.text)

    def flow(self, call: Call, options: Options) -> Flow:
        """The named dims of one call. Only factors of compound dims depend on more than the numbers of dims."""
        if self.has_compound:
            return self._labelled(call, options)
        ndims = tuple(None if m is None else m.ndim for m in (*call.operands, None, *call.outputs))
        named = self.positional is None or _has_lists(call.op)
        key = (id(options), ndims, len(call.outputs), call.operand_names if named else None)
        found = self._flows.get(key)
        if found is None:
            if len(self._flows) >= _MAX_FLOWS:
                self._flows.clear()
            # Options are kept with the flow, so their identity stays theirs.
            found = self._flows[key] = (self._labelled(call, options), options)
        return found[0]

    def _labelled(self, call: Call, options: Options) -> Flow:
        if self.positional is not None:
            return labelled(call, _per_element(call, self.positional.inputs), self.positional.outputs, options)
        inputs = [self.named[name.partition("[")[0]] for name in call.operand_names]
        assert self.result is not None
        return labelled(call, inputs, [self.result] * len(call.outputs), options)

    def __str__(self) -> str:
        return self.text


def _per_element(call: Call, inputs: Sequence[Operand]) -> Sequence[Operand]:
    """An operand per tensor: what is written for a list of tensors holds for each of them."""
    names = [a.name for a in call.signature.tensor_args if not a.is_out]
    if not _has_lists(call.op) or len(inputs) != len(names):
        return inputs
    written = dict(zip(names, inputs, strict=True))
    return [written[name.partition("[")[0]] for name in call.operand_names]


def _check_counts(op: Op, text: str, parsed: Notation) -> None:
    tensors = [a.name for a in signature(op).tensor_args if not a.is_out]
    if len(parsed.inputs) != len(tensors) and not (len(parsed.inputs) == 1 and _has_lists(op)):
        raise NotationError(
            asked=f"make the rule {text!r} for {op_name(op)}",
            found=f"it has {len(parsed.inputs)} inputs, the op {len(tensors)} tensor arguments: {listed(tensors)}",
            do="Write one operand per tensor argument, in schema order.",
            op=op_name(op),
        )
    results = [r for r in signature(op).results if r.is_tensor]
    if len(parsed.outputs) not in (1, len(results)) and not any(r.is_list for r in results) and results:
        raise NotationError(
            asked=f"make the rule {text!r} for {op_name(op)}",
            found=f"it has {len(parsed.outputs)} outputs and the op has {len(results)} tensor results",
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


def _has_lists(op: Op) -> bool:
    return any(a.kind is Kind.TENSORS for a in signature(op).tensor_args)


def labelled(call: Call, inputs: Sequence[Operand], outputs: Sequence[Operand], options: Options) -> Flow:
    """Names for every dim of the call's tensors: ellipses expanded, compound dims given their sizes."""
    if len(inputs) == 1 and len(call.operands) != 1:
        inputs = list(inputs) * len(call.operands)
    if len(outputs) == 1 and len(call.outputs) != 1:
        outputs = list(outputs) * len(call.outputs)
    described = [*zip(inputs, call.operands, strict=True), *zip(outputs, call.outputs, strict=True)]
    sizes: dict[str, int] = {}
    labels = [_expand(call, operand, meta) for operand, meta in described]
    for dims, (_, meta) in zip(labels, described, strict=True):
        for name, n in zip(dims or (), meta.shape if meta is not None and dims is not None else (), strict=False):
            if isinstance(name, str) and sizes.get(name, 1) == 1:
                sizes[name] = n
    sized = [
        None if dims is None else tuple(_sized(call, d, meta, i, sizes) for i, d in enumerate(dims))
        for dims, (_, meta) in zip(labels, described, strict=True)
    ]
    return Flow(
        sized[: len(inputs)],
        sized[len(inputs) :],
        reduce=options.reduce,
        replicate=options.replicate,
        partial=options.partial,
        lowered=options.lowered,
        nonempty=options.nonempty,
    )


def _expand(call: Call, operand: Operand, meta: TensorMeta | None) -> tuple[Any, ...] | None:
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
            found=f"the rule writes {str(operand)!r} for a tensor of {meta.ndim} dims: {meta}",
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
