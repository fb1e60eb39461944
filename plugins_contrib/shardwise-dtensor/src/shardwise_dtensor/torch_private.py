"""Every use of torch API that is not public. The classes that DTensor's rules are made of have no public name.

``tests/test_torch_private.py`` has one test per use, which fails if a torch release removes it. Written against torch
2.11 to 2.13.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import register_sharding

from shardwise.rule import AbstractMesh, Mesh, Op

try:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import (
        OpSchema,
        OpSpec,
        OpStrategy,
        OutputSharding,
        PlacementList,
        RuntimeSchemaInfo,
        StrategyType,
        TupleStrategy,
    )
except ImportError as error:
    raise ImportError(
        f"shardwise-dtensor knows the DTensor of torch 2.11 to 2.13, and torch {torch.__version__} lacks a part of it: "
        f"{error}. Use one of these releases, or a newer shardwise-dtensor."
    ) from error

__all__ = [
    "DTensorSpec",
    "OpSchema",
    "OpSpec",
    "OpStrategy",
    "OutputSharding",
    "PlacementList",
    "RuntimeSchemaInfo",
    "StrategyType",
    "TensorMeta",
    "TupleStrategy",
    "forget_choices",
    "has_handler",
    "has_rule",
    "put_rule",
    "rewrites_arguments",
    "schema_of",
    "second_copy",
    "torch_mesh",
    "varying",
]

# Where DTensor looks for a rule, and for the arguments that key its choice. An op in the second table hides what
# register_sharding writes to the first.
_RULES = ("op_strategy_funcs", "op_single_dim_strategy_funcs", "op_to_rules")
_KEYS = ("op_to_schema_info", "op_to_schema_info_for_single_dim_strategy")
# Ops whose arguments DTensor itself makes local, whatever rule they have.
_REWRITTEN = ("op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster", "squeeze_op_to_dims_variant")
_MISSING = object()


def _propagator() -> Any:
    return DTensor._op_dispatcher.sharding_propagator


def _table(name: str) -> dict[Any, Any]:
    # Releases differ in which tables they have.
    table: dict[Any, Any] = getattr(_propagator(), name, {})
    return table


def schema_of(op: Op) -> Any:
    """The ``FunctionSchema`` of an op overload, which has no public accessor."""
    return op._schema


def has_rule(op: Op) -> bool:
    """Whether DTensor has a rule for an op. ``register_sharding`` does not say so; it overwrites the rule."""
    return any(op in _table(name) for name in _RULES)


def has_handler(op: Op) -> bool:
    """Whether DTensor runs the op by code of its own, without asking a rule."""
    return op in DTensor._op_dispatcher._custom_op_handlers


def rewrites_arguments(op: Op) -> bool:
    """Whether DTensor makes arguments of the op local by itself, as its own rule needs it."""
    return any(op in _table(name) for name in _REWRITTEN)


def put_rule(
    op: Op, function: Callable[..., Any], positional: int | None, keywords: Sequence[str]
) -> Callable[[], None]:
    """Register ``function`` by ``register_sharding``; returns a function that restores what was there before.

    Arguments from index ``positional`` on and ``keywords`` key DTensor's choice. ``register_sharding`` alone keys only
    by integers and the arguments behind the first one, so calls with different flags, lists or strings would share a
    choice.
    """
    before = {name: _table(name).get(op, _MISSING) for name in (*_RULES, *_KEYS)}
    for name in _RULES:
        _table(name).pop(op, None)
    register_sharding(op)(function)
    # Torch's default index: behind all arguments.
    first = RuntimeSchemaInfo().static_argnum if positional is None else positional
    _table("op_to_schema_info")[op] = RuntimeSchemaInfo(first, list(keywords) or None, needs_pytree=True)
    forget_choices()

    def undo() -> None:
        for name, value in before.items():
            if value is _MISSING:
                _table(name).pop(op, None)
            else:
                _table(name)[op] = value
        forget_choices()

    return undo


def forget_choices() -> None:
    """Drop DTensor's cached choices in this thread; both of its caches are per thread."""
    _propagator().propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def varying(op: Op, by_type: frozenset[str]) -> tuple[int | None, tuple[str, ...]]:
    """What must key DTensor's choice for an op: the index of the first positional argument, and keyword-only names.

    Every argument must, but tensors and the floats among ``by_type``, whose values change from call to call and which
    no rule may read. (A ``Scalar`` may be an integer or a float, which can decide the dtype of a result.)
    """
    positional, keywords = None, []
    for i, arg in enumerate(op._schema.arguments):
        if _holds_tensors(arg.type) or (arg.name in by_type and isinstance(arg.type, torch.FloatType)):
            continue
        if arg.kwarg_only:
            keywords.append(arg.name)
        elif positional is None:
            positional = i
    return positional, tuple(keywords)


def _holds_tensors(kind: Any) -> bool:
    if isinstance(kind, (torch.OptionalType, torch.ListType)):
        return _holds_tensors(kind.getElementType())
    return isinstance(kind, torch.TensorType)


def torch_mesh(mesh: Mesh) -> DeviceMesh:
    """A ``DeviceMesh`` as it is; for an abstract mesh, a mesh of its shape without process groups, seen from rank 0."""
    return _without_groups(mesh) if isinstance(mesh, AbstractMesh) else mesh


@lru_cache(maxsize=64)
def _without_groups(mesh: AbstractMesh) -> DeviceMesh:
    ranks = torch.arange(mesh.size()).reshape(mesh.shape)
    return DeviceMesh(mesh.device_type, ranks, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False, _rank=0)


def second_copy(name: str, **stand_ins: Any) -> ModuleType:
    """A second copy of a module of torch in which some of its module-level names stand for something else.

    Torch's own module stays as it is. The styles of ``parallelize_module`` name the tensor class and two functions, and
    no argument replaces them; all else in them holds for any tensor class with DTensor's methods. The copy is kept
    among the imported modules under a name of this package, where ``torch.compile`` looks for the globals of a
    function. Raises :class:`ImportError` if torch's module is gone or lacks one of the names.
    """
    own = f"{__package__}.{name.rpartition('.')[2]}_of_torch"
    found = find_spec(name)
    if found is None or found.origin is None:
        raise ImportError(f"torch {torch.__version__} has no module {name}, which shardwise-dtensor makes a copy of")
    spec = spec_from_file_location(own, found.origin)
    if spec is None or spec.loader is None:
        raise ImportError(f"shardwise-dtensor cannot read {found.origin} to make a copy of {name}")
    copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    missing = sorted(stand_ins.keys() - vars(copy).keys())
    if missing:
        raise ImportError(
            f"{name} of torch {torch.__version__} has no name {', '.join(missing)}, which shardwise-dtensor replaces "
            f"in its copy. Use torch 2.11 to 2.13, or a newer shardwise-dtensor."
        )
    vars(copy).update(stand_ins)
    sys.modules[own] = copy
    return copy
