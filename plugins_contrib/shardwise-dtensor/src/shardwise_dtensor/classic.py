"""Rules in DTensor's two classic styles as shardwise rules.

The decorators have the names and the signatures of DTensor's own. They register nothing: each module keeps its rules,
and a plugin's hook registers them: ``registry.add(*rules_of(module))``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, TypeVar

from attrs import evolve

from shardwise.errors import RuleError
from shardwise.rule import FullMeshRule, Mesh, Op, OpSchema, OpStrategy, Rule, full_mesh_rule
from shardwise_dtensor import torch_private
from shardwise_dtensor.answers import from_op_strategy, from_output_sharding
from shardwise_dtensor.questions import classic_schema
from shardwise_dtensor.running import run_classic
from shardwise_dtensor.torch_private import RuntimeSchemaInfo, torch_mesh

__all__ = ["keep", "register_op_strategy", "register_prop_rule", "rules_of"]

Function = TypeVar("Function", bound=Callable[..., Any])
_RULES = "__shardwise_dtensor_rules__"


def register_op_strategy(
    op: Op | list[Op], schema_info: RuntimeSchemaInfo | None = None
) -> Callable[[Function], Function]:
    """Decorator: a rule from ``(mesh, op_schema) -> OpStrategy`` or ``(op_schema) -> OpStrategy``, in torch's classes.

    The decorator returns the function unchanged; :func:`rules_of` gives the rule. Arguments that ``schema_info`` makes
    static are keyed by value, and so are those that shardwise keys by value for their schema type. Of all others
    (floats, scalars) the function sees only the type.
    """

    def make(function: Callable[..., Any], of: Op) -> Callable[[Mesh, OpSchema], OpStrategy]:
        takes_mesh = _takes_mesh(function)

        def strategies(mesh: Mesh, schema: OpSchema) -> OpStrategy:
            at = torch_mesh(mesh)
            question = classic_schema(schema, at, schema_info, wrap=True)
            answer = run_classic(function, schema, *((at, question) if takes_mesh else (question,)))
            return from_op_strategy(schema, answer)

        return strategies

    return _recorder(op, schema_info, make, "op strategy")


def register_prop_rule(
    op: Op | list[Op], schema_info: RuntimeSchemaInfo | None = None
) -> Callable[[Function], Function]:
    """Decorator: a rule from ``(op_schema) -> OutputSharding``, in torch's classes, specs in place of tensors.

    It has one strategy per call: the function's answer. If that is a suggestion without an output, the function is
    called again with its suggestion. All else is as in :func:`register_op_strategy`.
    """

    def make(function: Callable[..., Any], of: Op) -> Callable[[Mesh, OpSchema], OpStrategy]:
        def strategies(mesh: Mesh, schema: OpSchema) -> OpStrategy:
            question = classic_schema(schema, torch_mesh(mesh), schema_info, wrap=False)
            return from_output_sharding(schema, question, partial(run_classic, function, schema))

        return strategies

    return _recorder(op, schema_info, make, "propagation rule")


def rules_of(*modules: ModuleType | Mapping[str, Any]) -> tuple[FullMeshRule | Rule, ...]:
    """The rules that the decorators made in these modules (or namespaces), in that order, for a plugin's hook.

    Raises :class:`RuleError` for a module without such a rule.
    """
    rules: list[FullMeshRule | Rule] = []
    for module in modules:
        namespace = vars(module) if isinstance(module, ModuleType) else module
        own: dict[Any, FullMeshRule | Rule] = namespace.get(_RULES, {})
        if not own:
            raise RuleError(
                asked=f"collect the classic rules of {namespace.get('__name__', 'a namespace')}",
                found="no decorator of shardwise_dtensor was used in it",
                do="Import register_op_strategy and register_prop_rule from shardwise_dtensor there, not from torch.",
            )
        rules += own.values()
    return tuple(rules)


def keep(namespace: dict[str, Any], op: Op, rule: FullMeshRule | Rule) -> None:
    """Keep a rule for :func:`rules_of`. It is keyed by source, so that a module that is loaded again has it once."""
    namespace.setdefault(_RULES, {})[op, rule.source] = rule


# -- making and keeping a rule -----------------------------------------------------------------------------------


def _recorder(
    ops: Op | Iterable[Op],
    schema_info: RuntimeSchemaInfo | None,
    make: Callable[[Callable[..., Any], Op], Callable[[Mesh, OpSchema], OpStrategy]],
    style: str,
) -> Callable[[Function], Function]:
    # The module that calls the public decorator. The function itself may be from another module, or from torch.
    frame = sys._getframe(2)
    namespace = frame.f_globals
    caller = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    overloads = (ops,) if isinstance(ops, Op) else tuple(ops)

    def decorate(function: Function) -> Function:
        name, source = _named(function, caller)
        for op in overloads:
            rule = full_mesh_rule(op, static=_static(op, schema_info))(make(function, op))
            keep(namespace, op, evolve(rule, source=source, text=f"classic {style} {name}"))
        return function

    return decorate


def _named(function: Callable[..., Any], caller: str) -> tuple[str, str]:
    inner = function
    while isinstance(inner, partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__name__", type(inner).__name__)
    return name, f"{code.co_filename}:{code.co_firstlineno}" if code else caller


def _static(op: Op, schema_info: RuntimeSchemaInfo | None) -> tuple[str, ...]:
    """The names of the arguments that torch's schema info makes part of the key."""
    if schema_info is None:
        return ()
    arguments = torch_private.schema_of(op).arguments
    named = set(schema_info.static_kwargkey or ())
    behind = {a.name for a in arguments[schema_info.static_argnum :] if not a.kwarg_only}
    tensors = {a.name for a in OpSchema.of(op).signature.tensor_args}
    return tuple(a.name for a in arguments if a.name in (named | behind) - tensors)


def _takes_mesh(function: Callable[..., Any]) -> bool:
    """Whether a strategy function has the older style, ``(mesh, op_schema)``."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) not in (1, 2):
        raise RuleError(
            asked=f"make a rule of {getattr(function, '__name__', function)!r}",
            found=f"it takes {len(needed)} arguments",
            do="Write (op_schema), or (mesh, op_schema) as in older releases of torch.",
        )
    return len(needed) == 2  # noqa: PLR2004  # the two styles
