"""Rules: what is legal for one op. The authoring surface that plugins import.

A rule is a value. Making one checks it against the op's schema. It takes effect when a plugin's hook registers it.
There are two forms: rows per mesh dim (:func:`rule`, :func:`rule_from`), and a function of the full mesh
(:func:`full_mesh_rule`) for an op that no per-mesh-dim row can describe.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import CodeType
from typing import Any, Unpack

from shardwise.errors import RuleArgumentError, RuleError
from shardwise.kernel.arguments import kind_of
from shardwise.kernel.plurals import counted
from shardwise.kernel.rule import FullMeshRule, Results, Rows, Rule, Work
from shardwise.kernel.signature import Call, Kind, Op, as_op, op_name, signature
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.ops import OpLike
from shardwise.rule.facts import Facts, FactWords, stated
from shardwise.rule.flow import Flow, RowNames, row_names
from shardwise.rule.labels import labels
from shardwise.rule.lowering import LocalArgs, Lowering
from shardwise.rule.options import checked_functions, checked_replaces, names_of, reductions_of, rows_of
from shardwise.rule.pattern import Options, Pattern, listed

__all__ = ["einop", "full_mesh_rule", "like", "rule", "rule_from"]

Described = Flow | Rows
Description = Described | Callable[[Call], Described]
Describe = Callable[[Call], Description]


# -- making rules ------------------------------------------------------------------------------------------------


def rule(  # noqa: PLR0913  # keyword-only options of one value
    ops: OpLike | Iterable[OpLike],
    notation: str | Mapping[str, str],
    *,
    reduce: Mapping[str, str] | None = None,
    replicate: Iterable[str] = (),
    partial: Iterable[str | Facts] = (),
    static: Iterable[str] = (),
    zip_lists: bool = False,
    lowering: Lowering | Mapping[Any, Lowering] | None = None,
    local_args: LocalArgs | None = None,
    nonempty: Iterable[str] = (),
    scattered: Iterable[str] = (),
    replaces: str | None = None,
    work: Work | None = None,
    **facts: Unpack[FactWords],
) -> Rule:
    """A rule in einop notation.

    ``notation`` is ``"m k, k n -> m n"`` (one operand per tensor argument in schema order, one per tensor result) or
    a mapping ``{"self other": "...", "lr": "R", "->": "..."}`` from argument names to operands (without ``"->"``,
    every result is like the first argument named). An operand with fewer dims than named is right-aligned; a size-1
    dim broadcasts. ``reduce`` names the reduction of a dim that vanishes, ``replicate`` the dims that must be
    whole.

    Facts say by name which operands may be partial: ``linear="grad_out"``, ``linear=("self", "mat2")`` (one at a time),
    ``linear="self other"`` (both together). The other facts are ``affine``, ``monotone``, ``decreasing`` and ``moves``;
    see :mod:`shardwise.rule.facts`. ``partial`` holds the rows that no fact states: an entry per tensor, each ``R``, a
    reduction, ``*`` (any reduction) or a dim. A trailing ``, ...`` repeats the last entry.

    ``lowering`` is a function that runs in place of the op: for every row but the whole one, or, as a mapping, for the
    rows that it names: ``{"k": add_once}``, ``{("k", "R, sum -> sum"): add_once}``. A row is named by its dim, its text
    or its fact (which then need not stand in ``partial`` too); ``R`` is the whole row and ``*`` every other. There is
    one function per rule: mesh dims may take different rows, and a call runs once. ``scattered`` names the dims (``*``
    for all) along which it does not ask where a shard starts: there, shards may be strided.

    ``replaces`` names a plugin or a distribution; this rule replaces the rules for these ops that it provides
    (``"shardwise"`` for all plugins that ship with it). Without it, two rules for one op are a conflict.

    ``work(call)`` gives the floating-point operations of the whole call, for planning; rows that shard a dim divide
    them. An op whose time goes into reading and writing its tensors needs none.

    Raises :class:`NotationError` or :class:`RuleArgumentError` when the rule does not fit the ops' schemas.
    """
    ops = _as_ops(ops)
    function, lowered = _attached(lowering)
    checked_functions(lowering=function, local_args=local_args, work=work)
    options = _options(reduce, replicate, (*stated(facts), *rows_of("partial", partial)), lowered, nonempty, scattered)
    pattern = Pattern.of(notation, options)
    pattern.check(ops)
    return Rule(
        ops=ops,
        describe=pattern.flow,
        text=pattern.text,
        static=_checked_static(ops, static),
        zip_lists=zip_lists,
        lowering=function,
        local_args=local_args,
        source=_caller(),
        partial=(*map(str, options.partial), *(f"{row} (lowering)" for row in _rows_of_lowering(options))),
        replaces=checked_replaces(replaces),
        work=work,
    )


def _rows_of_lowering(options: Options) -> Iterator[str | Facts]:
    """The rows that a rule has by its lowering alone; one that names a dim is a row of the notation."""
    rows = (row for row in options.lowered if isinstance(row, Facts) or "->" in row)
    return (row for row in rows if row not in options.partial)


def rule_from(  # noqa: PLR0913  # keyword-only options of one value
    ops: OpLike | Iterable[OpLike],
    *,
    static: Iterable[str] = (),
    zip_lists: bool = False,
    lowering: Lowering | None = None,
    local_args: LocalArgs | None = None,
    writes: Iterable[str] = (),
    results: Results | None = None,
    replaces: str | None = None,
    meta: Callable[..., Any] | None = None,
    work: Work | None = None,
) -> Callable[[Callable[..., Description]], Rule]:
    """Decorator: a rule from a function of one call's arguments.

    The function takes the op's arguments in schema order: as many as it declares, keyword-only ones by name, never
    ``out=``. It gets a :class:`TensorMeta` in place of each tensor, and returns :func:`like`, :func:`einop`, a
    :class:`Flow` or :class:`Rows`, whose ``lowered=`` names the rows that run ``lowering``. A parameter named ``call``
    gets the whole :class:`Call`, metas of the results included. The function may read the value of an argument that is
    keyed by type (a float, a scalar) only if ``static`` names it.

    ``writes`` names operands that the ops write though their schemas do not say so: they stay where they are, as the
    written operand of an in-place op does. ``results(call, device_type)`` gives the metas of the results where a
    device's kernel differs from the meta device. ``meta`` takes the op's arguments, tensors on the meta device, and
    returns its results there: for an op without a meta kernel, or with one that refuses what a device takes. It should
    refuse what every device refuses. ``replaces`` and ``work`` are as in :func:`rule`.
    """
    ops = _as_ops(ops)
    keyed = _checked_static(ops, static)
    checked_functions(lowering=lowering, local_args=local_args, results=results, meta=meta, work=work)
    checked_replaces(replaces)

    def make(function: Callable[..., Description]) -> Rule:
        code = _code_of(function, "rule_from")
        arguments = _arguments(function)
        return Rule(
            ops=ops,
            describe=lambda call: function(**arguments(call)),
            text=(inspect.getdoc(function) or f"{function.__name__}(...)").splitlines()[0],
            static=keyed,
            zip_lists=zip_lists,
            lowering=lowering,
            local_args=local_args,
            source=f"{code.co_filename}:{code.co_firstlineno}",
            writes=_checked_writes(ops, writes),
            results=results,
            replaces=replaces,
            meta=meta,
            form="rule_from",
            work=work,
        )

    return make


def full_mesh_rule(
    ops: OpLike | Iterable[OpLike],
    *,
    static: Iterable[str] = (),
    lowering: Lowering | None = None,
    local_args: LocalArgs | None = None,
    replaces: str | None = None,
) -> Callable[[Callable[[Any, Any], Any]], FullMeshRule]:
    """Decorator: a rule from a function ``(mesh, op_schema) -> OpStrategy`` over the full mesh.

    ``replaces`` is as in :func:`rule`.
    """
    ops = _as_ops(ops)
    keyed = _checked_static(ops, static)
    checked_functions(lowering=lowering, local_args=local_args)
    checked_replaces(replaces)

    def make(function: Callable[[Any, Any], Any]) -> FullMeshRule:
        code = _code_of(function, "full_mesh_rule")
        source = f"{code.co_filename}:{code.co_firstlineno}"
        return FullMeshRule(ops, function, source, keyed, lowering, local_args, replaces=replaces)

    return make


# -- what a rule_from function returns ---------------------------------------------------------------------------


def like(
    x: TensorMeta,
    *,
    whole: int | Iterable[int] = (),
    partial: Iterable[str | Facts] = (),
    lowered: RowNames = (),
    scattered: Iterable[str] = (),
    **facts: Unpack[FactWords],
) -> Flow:
    """Every operand and result has the dims of ``x``; each dim may be sharded but those in ``whole``.

    Facts, ``partial``, ``lowered`` and ``scattered`` are as in :class:`Flow`.
    """
    if not isinstance(x, TensorMeta):
        raise RuleArgumentError(
            asked=f"describe a call by like({x!r})",
            found=f"it is {kind_of(x)}, and not a tensor of the call",
            do="Pass one of the function's tensor arguments; for one that may be None, write Flow or einop.",
            argument="x",
        )
    names = labels(x.ndim, whole if x.ndim else ())
    return Flow([names], [names], partial=partial, lowered=lowered, scattered=scattered, **facts)


def einop(
    notation: str,
    *,
    reduce: Mapping[str, str] | None = None,
    replicate: Iterable[str] = (),
    partial: Iterable[str | Facts] = (),
    lowered: RowNames = (),
    nonempty: Iterable[str] = (),
    scattered: Iterable[str] = (),
    **facts: Unpack[FactWords],
) -> Callable[[Call], Flow]:
    """The notation and options of :func:`rule`, for one call; what a :func:`rule_from` function may return.

    ``lowered`` names the rows that run the rule's lowering, as in :class:`Flow`. The function that is returned serves
    any number of calls, and caches what it works out.
    """
    rows = (*stated(facts), *rows_of("partial", partial))
    return Pattern.of(notation, _options(reduce, replicate, rows, row_names(lowered), nonempty, scattered)).flow


# -- small parts -------------------------------------------------------------------------------------------------


def _options(
    reduce: Mapping[str, str] | None,
    replicate: Iterable[str],
    partial: tuple[str | Facts, ...],
    lowered: tuple[str | Facts, ...],
    nonempty: Iterable[str],
    scattered: Iterable[str],
) -> Options:
    replicated, filled = (
        frozenset(names_of(option, value)) for option, value in (("replicate", replicate), ("nonempty", nonempty))
    )
    return Options(
        reductions_of(reduce), replicated, partial, lowered, filled, frozenset(names_of("scattered", scattered))
    )


def _code_of(function: Any, decorator: str) -> CodeType:
    """The code of a function that is decorated. Raises :class:`RuleArgumentError` for anything but such a function."""
    if not inspect.isfunction(function):
        raise RuleArgumentError(
            asked=f"make a rule by {decorator}",
            found=f"what it decorates is {kind_of(function)}",
            do=f"Write @{decorator}(op) above a function, or call {decorator}(op)(function).",
            argument="function",
        )
    for name, parameter in inspect.signature(function).parameters.items():
        if decorator == "rule_from" and parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise RuleArgumentError(
                asked=f"make a rule by {decorator} of {function.__name__}",
                found=f"its parameter {parameter} has no name that an argument is passed by",
                do="Name the arguments of the op that it reads, or take `call`, which has all of them.",
                argument=name,
            )
    return function.__code__


def _attached(
    lowering: Lowering | Mapping[Any, Lowering] | None,
) -> tuple[Lowering | None, tuple[str | Facts, ...]]:
    """A rule's lowering, and the names of the rows that run it."""
    if lowering is None:
        return None, ()
    if not isinstance(lowering, Mapping):
        return lowering, ("*",)
    functions = list(dict.fromkeys(lowering.values()))
    if len(functions) != 1:
        raise RuleError(
            asked="make a rule whose lowering is attached to rows",
            found=f"the mapping has {counted(len(functions), 'function')}",
            do="Attach one function: mesh dims may take different rows, and it runs once for all of them. The specs "
            "tell it which rows they are.",
        )
    return functions[0], tuple(name for names in lowering for name in row_names(names))


def _as_ops(ops: OpLike | Iterable[OpLike]) -> tuple[Op, ...]:
    named: tuple[Any, ...]
    named = (ops,) if isinstance(ops, (OpLike, str)) or not isinstance(ops, Iterable) else tuple(ops)
    overloads = [as_op(op) for op in named]
    if not named or None in overloads:
        wrong = next((op for op, overload in zip(named, overloads, strict=True) if overload is None), None)
        raise RuleError(
            asked="make a rule",
            found=f"{wrong!r} is not one op overload" if named else "no op is named",
            do="Name overloads, as in torch.ops.aten.mm.default, or what torch.library.custom_op returned.",
        )
    return tuple(op for op in overloads if op is not None)


def _checked_static(ops: Sequence[Op], static: Iterable[str]) -> frozenset[str]:
    names = frozenset(names_of("static", static))
    if not names:  # to read the schemas of all ops is most of what making a rule costs
        return names
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
            found=f"none of the rule's ops has it; they have {listed([a.name for a in signature(ops[0]).args])}",
            do="Correct the name in static=.",
            op=op_name(ops[0]),
            argument=unknown[0],
        )
    return names


def _checked_writes(ops: Sequence[Op], writes: Iterable[str]) -> frozenset[str]:
    names = frozenset(names_of("writes", writes))
    if not names:
        return names
    known = {a.name for op in ops for a in signature(op).tensor_args}
    for name in sorted(names - known):
        raise RuleArgumentError(
            asked=f"make a rule for {op_name(ops[0])}",
            found=f"it writes {name!r}, which is not a tensor argument of its ops: {listed(known)}",
            do="Correct the name in writes=.",
            op=op_name(ops[0]),
            argument=name,
        )
    return names


def _arguments(function: Callable[..., Any]) -> Callable[[Call], dict[str, Any]]:
    """A function that gives a call's arguments under ``function``'s parameter names.

    A parameter gets the argument of its name, or else the one at its position.
    """
    parameters = inspect.signature(function).parameters
    declared = [p for p in parameters if p != "call"]
    wants_call = "call" in parameters
    names_of: dict[Op, list[tuple[str, str]]] = {}

    def arguments(call: Call) -> dict[str, Any]:
        names = names_of.get(call.op)
        if names is None:
            positional = [a.name for a in call.signature.args if not a.kwarg_only]
            names = names_of[call.op] = []
            for i, parameter in enumerate(declared):
                if parameter in call.args:
                    names.append((parameter, parameter))
                elif i < len(positional):
                    names.append((parameter, positional[i]))
        values = {parameter: call.args[name] for parameter, name in names}
        if wants_call:
            values["call"] = call
        return values

    return arguments


def _caller() -> str:
    """File and line of the call of the public function that called this."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame else None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown"
