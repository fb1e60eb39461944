"""Rules: what is legal for one op. The authoring surface that plugins import.

A rule is a value. Making one checks it against the op's schema; nothing is registered until a plugin's hook hands it
over. There are two forms: rows per mesh dim (:func:`rule`, :func:`rule_from`), and a function of the full mesh
(:func:`full_mesh_rule`) for an op that no per-mesh-dim row can describe.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from shardwise.errors import NotationError, RuleArgumentError, RuleError
from shardwise.flow import Flow, Label, Row, Rows, flag_or_names, split_row
from shardwise.lowering import LocalArgs, LocalCall, Lowering
from shardwise.notation import ELLIPSIS, Notation, Operand, parse, parse_operand
from shardwise.placements import PENDING_KINDS, partial, shard
from shardwise.signature import ByType, Call, Kind, Op, op_name, signature
from shardwise.spec import TensorMeta

__all__ = [
    "Call",
    "Flow",
    "FullMeshRule",
    "LocalCall",
    "Op",
    "Row",
    "Rows",
    "Rule",
    "einop",
    "full_mesh_rule",
    "like",
    "partial",
    "rule",
    "rule_from",
    "shard",
]

Described = Flow | Rows
Description = Described | Callable[[Call], Described]
Describe = Callable[[Call], Description]
# (call, device type) -> metas of the results as that device's kernels return them, if the meta device says otherwise.
Results = Callable[[Call, str], Sequence[TensorMeta | None]]


@frozen(eq=False)
class Rule:
    """What is legal for some ops that behave alike. Made by :func:`rule` or :func:`rule_from`, never by hand.

    ``text`` is the notation as written. ``static`` names arguments keyed by value beyond those that are so by their
    schema type. ``zip_lists`` gives each position of the tensor lists its own choice. ``writes`` names operands that
    the ops write though their schemas do not say so, ``results`` corrects the metas of the results.
    """

    ops: tuple[Op, ...]
    describe: Describe
    text: str
    static: frozenset[str]
    zip_lists: bool
    lowering: Lowering | None
    local_args: LocalArgs | None
    source: str
    partial: tuple[str, ...] = ()
    writes: frozenset[str] = frozenset()
    results: Results | None = None

    def rows(self, call: Call) -> tuple[Row, ...]:
        """The legal rows of one call in order of preference. For a ``zip_lists`` rule: of one list position."""
        described = self.describe(call)
        if callable(described):
            described = described(call)
        return (described.bind(call) if isinstance(described, Flow) else described).rows

    def __str__(self) -> str:
        return f"{', '.join(map(op_name, self.ops))}: {self.text}"


@frozen(eq=False)
class FullMeshRule:
    """A function ``(mesh, op_schema) -> OpStrategy`` that enumerates full strategies itself."""

    ops: tuple[Op, ...]
    strategies: Callable[[Any, Any], Any]
    source: str
    static: frozenset[str] = frozenset()
    lowering: Lowering | None = None
    local_args: LocalArgs | None = None
    text: str = "function of the full mesh"
    zip_lists: bool = field(default=False, init=False)
    writes: frozenset[str] = field(default=frozenset(), init=False)
    results: Results | None = field(default=None, init=False)

    def __str__(self) -> str:
        return f"{', '.join(map(op_name, self.ops))}: {self.text}"


AnyRule = Rule | FullMeshRule


# -- making rules ------------------------------------------------------------------------------------------------


def rule(  # noqa: PLR0913  # keyword-only options of one value
    ops: Op | Iterable[Op],
    notation: str | Mapping[str, str],
    *,
    reduce: Mapping[str, str] | None = None,
    replicate: Iterable[str] = (),
    partial: Iterable[str] = (),
    static: Iterable[str] = (),
    zip_lists: bool = False,
    lowering: Lowering | None = None,
    local_args: LocalArgs | None = None,
    lowered: bool | Iterable[str] | None = None,
    nonempty: Iterable[str] = (),
) -> Rule:
    """A rule in einop notation.

    ``notation`` is ``"m k, k n -> m n"`` (one operand per tensor argument in schema order, one per tensor result) or
    a mapping ``{"self other": "...", "lr": "R", "->": "..."}`` from argument names to operands (without ``"->"``,
    every result is like the first argument named). An operand with fewer dims than named is right-aligned; a size-1
    dim broadcasts. ``reduce`` names the pending kind of a dim that vanishes, ``replicate`` the dims that must be
    whole, ``partial`` further legal rows: an entry per tensor, each ``R``, a pending kind, ``*`` (any kind) or a dim;
    a trailing ``, ...`` repeats the last. ``lowered`` names the rows (by dim or row text; ``*``: every row) that run
    ``lowering``; all but ``R`` when it is not given.

    Raises :class:`NotationError` or :class:`RuleArgumentError` when the rule does not fit the ops' schemas.
    """
    ops = _as_ops(ops)
    shape = _Shape.of(ops, notation)
    options = _Options(
        reduce=dict(reduce or {}),
        replicate=frozenset(replicate),
        partial=tuple(partial),
        lowered=lowering is not None if lowered is None else flag_or_names(lowered),
        nonempty=frozenset(nonempty),
    )
    shape.check(options)
    return Rule(
        ops=ops,
        describe=lambda call: shape.flow(call, options),
        text=str(shape),
        static=_checked_static(ops, static),
        zip_lists=zip_lists,
        lowering=lowering,
        local_args=local_args,
        source=_caller(),
        partial=options.partial,
    )


def rule_from(
    ops: Op | Iterable[Op],
    *,
    static: Iterable[str] = (),
    zip_lists: bool = False,
    lowering: Lowering | None = None,
    local_args: LocalArgs | None = None,
    writes: Iterable[str] = (),
    results: Results | None = None,
) -> Callable[[Callable[..., Description]], Rule]:
    """Decorator: a rule from a function of one call's arguments.

    The function takes the op's arguments in schema order (as many as it declares; keyword-only ones by name; ``out=``
    never), with :class:`TensorMeta` in place of tensors, and returns :func:`like`, :func:`einop`, a :class:`Flow` or
    :class:`Rows`. A parameter named ``call`` gets the whole :class:`Call`, output metas included. Arguments that are
    keyed by type only (floats, scalars) must be named in ``static`` before the function may read their value.

    ``writes`` names operands that the ops write though their schemas do not say so: they stay where they are, as the
    written operand of an in-place op does. ``results(call, device_type)`` gives the metas of the results where a
    device's kernel differs from the meta device.
    """
    ops = _as_ops(ops)
    keyed = _checked_static(ops, static)

    def make(function: Callable[..., Description]) -> Rule:
        code = function.__code__
        return Rule(
            ops=ops,
            describe=lambda call: function(**_arguments(function, call)),
            text=(inspect.getdoc(function) or f"{function.__name__}(...)").splitlines()[0],
            static=keyed,
            zip_lists=zip_lists,
            lowering=lowering,
            local_args=local_args,
            source=f"{code.co_filename}:{code.co_firstlineno}",
            writes=_checked_writes(ops, writes),
            results=results,
        )

    return make


def full_mesh_rule(
    ops: Op | Iterable[Op],
    *,
    static: Iterable[str] = (),
    lowering: Lowering | None = None,
    local_args: LocalArgs | None = None,
) -> Callable[[Callable[[Any, Any], Any]], FullMeshRule]:
    """Decorator: a rule from a function ``(mesh, op_schema) -> OpStrategy`` over the full mesh."""
    ops = _as_ops(ops)
    keyed = _checked_static(ops, static)

    def make(function: Callable[[Any, Any], Any]) -> FullMeshRule:
        code = function.__code__
        return FullMeshRule(ops, function, f"{code.co_filename}:{code.co_firstlineno}", keyed, lowering, local_args)

    return make


# -- what a rule_from function returns ---------------------------------------------------------------------------


def like(
    x: TensorMeta,
    *,
    whole: Iterable[int] = (),
    partial: Iterable[str] = (),
    lowered: bool | Iterable[str] = False,
) -> Flow:
    """Every operand and result has the dims of ``x``; each dim may be sharded but those in ``whole``."""
    kept = {d % x.ndim for d in whole} if x.ndim else set()
    labels: tuple[Label, ...] = tuple(None if d in kept else f"d{d}" for d in range(x.ndim))
    return Flow([labels], [labels], partial=partial, lowered=lowered)


def einop(
    notation: str,
    *,
    reduce: Mapping[str, str] | None = None,
    replicate: Iterable[str] = (),
    partial: Iterable[str] = (),
    lowered: bool | Iterable[str] = False,
    nonempty: Iterable[str] = (),
) -> Callable[[Call], Flow]:
    """The notation and options of :func:`rule`, for one call; what a :func:`rule_from` function may return."""
    parsed = parse(notation)
    options = _Options(
        dict(reduce or {}),
        frozenset(replicate),
        tuple(partial),
        flag_or_names(lowered),
        frozenset(nonempty),
    )
    return lambda call: _labelled(call, parsed.inputs, parsed.outputs, options)


# -- notation against schemas ------------------------------------------------------------------------------------


@frozen
class _Options:
    reduce: dict[str, str]
    replicate: frozenset[str]
    partial: tuple[str, ...]
    lowered: bool | frozenset[str]
    nonempty: frozenset[str]


@frozen
class _Shape:
    """A rule's notation, by position or by argument name, checked against the schemas of its ops."""

    text: str
    positional: Notation | None
    named: Mapping[str, Operand]
    result: Operand | None

    @classmethod
    def of(cls, ops: Sequence[Op], notation: str | Mapping[str, str]) -> _Shape:
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

    def check(self, options: _Options) -> None:
        """Every vanishing dim is accounted for, and every option speaks of something that is there."""
        inputs, outputs = self.operands
        names = {n for o in inputs for n in o.names}
        made = {n for o in outputs for n in o.names}
        vanishing = {n for n in names if any(o.dims is not None and n not in o.names for o in outputs)}
        loose = vanishing - set(options.reduce) - options.replicate if outputs else set()
        if loose:
            raise self._error(
                f"{_listed(loose)} of the inputs is missing in an output",
                "Name it in reduce= (its shards are partial results) or in replicate= (it must be whole).",
            )
        for what, given in (
            ("reduce", set(options.reduce)),
            ("replicate", options.replicate),
            ("nonempty", options.nonempty),
        ):
            unknown = {n for n in given if n not in names and not n.startswith(ELLIPSIS)}
            if unknown:
                raise self._error(f"{what}= names {_listed(unknown)}, which no input has", "Use a dim of the inputs.")
        kinds = set(options.reduce.values()) - {*PENDING_KINDS, "R"}
        if kinds:
            raise self._error(f"{_listed(kinds)} is no pending kind", f"Use one of {', '.join(PENDING_KINDS)}.")
        if made - names:
            raise self._error(
                f"the output dim {_listed(made - names)} is in no input", "Write _ for a dim made by the op."
            )
        for text in options.partial:
            self._check_row(text, names)

    def _check_row(self, text: str, names: set[str]) -> None:
        left, right = split_row(text)
        words = {w for w in left + right if w not in {*PENDING_KINDS, "R", "*", "..."}} - names
        if words:
            raise self._error(
                f"the row {text!r} has {_listed(words)}, which is no placement and no dim",
                f"Use R, * or one of {', '.join(PENDING_KINDS)}, or a dim of the notation.",
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

    def flow(self, call: Call, options: _Options) -> Flow:
        if self.positional is not None:
            return _labelled(call, self.positional.inputs, self.positional.outputs, options)
        inputs = [self.named[name.partition("[")[0]] for name in call.operand_names]
        assert self.result is not None
        return _labelled(call, inputs, [self.result] * len(call.outputs), options)

    def __str__(self) -> str:
        return self.text


def _check_counts(op: Op, text: str, parsed: Notation) -> None:
    tensors = [a.name for a in signature(op).tensor_args if not a.is_out]
    if len(parsed.inputs) != len(tensors) and not (len(parsed.inputs) == 1 and _has_lists(op)):
        raise NotationError(
            asked=f"make the rule {text!r} for {op_name(op)}",
            found=f"it has {len(parsed.inputs)} inputs, the op {len(tensors)} tensor arguments: {_listed(tensors)}",
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
        what = f"it names {_listed(unknown)}" if unknown else f"it says nothing of {_listed(missing)}"
        raise RuleArgumentError(
            asked=f"make a rule for {op_name(op)}",
            found=f"{what}, and the op's tensor arguments are {_listed(known)}",
            do="Name exactly the op's tensor arguments (R for one that is whole).",
            op=op_name(op),
            argument=(unknown or missing)[0],
        )


def _has_lists(op: Op) -> bool:
    return any(a.kind is Kind.TENSORS for a in signature(op).tensor_args)


def _labelled(call: Call, inputs: Sequence[Operand], outputs: Sequence[Operand], options: _Options) -> Flow:
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
    dims = list(operand.dims)
    if ELLIPSIS in dims:
        at, extra = dims.index(ELLIPSIS), meta.ndim - (len(dims) - 1)
        dims[at : at + 1] = [f"{ELLIPSIS}{i}" for i in range(extra, 0, -1)]
    else:
        extra = meta.ndim - len(dims)
        dims = dims[-meta.ndim :] if meta.ndim else []
    if (extra < 0 and operand.has_ellipsis) or len(dims) != meta.ndim:
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


# -- small parts -------------------------------------------------------------------------------------------------


def _as_ops(ops: Op | Iterable[Op]) -> tuple[Op, ...]:
    given: tuple[Any, ...] = (ops,) if isinstance(ops, Op) else tuple(ops)
    if not given or not all(isinstance(op, Op) for op in given):
        wrong = next((op for op in given if not isinstance(op, Op)), None)
        raise RuleError(
            asked="make a rule",
            found=f"{wrong!r} is not an op overload" if given else "no op is named",
            do="Name overloads, as in torch.ops.aten.mm.default.",
        )
    return given


def _checked_static(ops: Sequence[Op], static: Iterable[str]) -> frozenset[str]:
    names = frozenset(static)
    for op in ops:
        known = {a.name: a.kind for a in signature(op).args}
        for name in sorted(names):
            if known.get(name) in (Kind.TENSOR, Kind.TENSORS):
                raise RuleArgumentError(
                    asked=f"key {op_name(op)} by its argument {name!r}",
                    found="it is a tensor",
                    do="Name non-tensor arguments in static=.",
                    op=op_name(op),
                    argument=name,
                )
    unknown = [n for n in sorted(names) if all(signature(op).index(n) is None for op in ops)]
    if unknown:
        raise RuleArgumentError(
            asked=f"key {op_name(ops[0])} by its argument {unknown[0]!r}",
            found=f"none of the rule's ops has it; they have {_listed([a.name for a in signature(ops[0]).args])}",
            do="Correct the name in static=.",
            op=op_name(ops[0]),
            argument=unknown[0],
        )
    return names


def _checked_writes(ops: Sequence[Op], writes: Iterable[str]) -> frozenset[str]:
    names = frozenset(writes)
    known = {a.name for op in ops for a in signature(op).tensor_args}
    for name in sorted(names - known):
        raise RuleArgumentError(
            asked=f"make a rule for {op_name(ops[0])}",
            found=f"it writes {name!r}, which is no tensor argument of its ops: {_listed(known)}",
            do="Correct the name in writes=.",
            op=op_name(ops[0]),
            argument=name,
        )
    return names


def _arguments(function: Callable[..., Any], call: Call) -> dict[str, Any]:
    """The call's arguments under the function's own parameter names: by position, keyword-only ones by name."""
    declared = [p for p in inspect.signature(function).parameters if p != "call"]
    by_position = [a.name for a in call.signature.args if not a.kwarg_only]
    given: dict[str, Any] = {"call": call} if "call" in inspect.signature(function).parameters else {}
    for i, parameter in enumerate(declared):
        if parameter in call.args:
            given[parameter] = call.args[parameter]
        elif i < len(by_position):
            given[parameter] = call.args[by_position[i]]
    return given


def _caller() -> str:
    """File and line of the call of the public function that called this."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame else None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(n) for n in (sorted(names) if isinstance(names, (set, frozenset)) else names))


def by_type(rule_: AnyRule, call_values: Sequence[Any], op: Op) -> dict[str, Any]:
    """A call's arguments with those that the rule keys by type replaced by :class:`ByType`."""
    shown: dict[str, Any] = {}
    for arg, value in zip(signature(op).args, call_values, strict=True):
        hidden = arg.kind is Kind.BY_TYPE and arg.name not in rule_.static and value is not None
        shown[arg.name] = ByType(arg.name, type(value)) if hidden else value
    return shown
