"""Calls whose operands lie on several meshes, as parameters on different slices of one mesh do.

Ops over lists run once per mesh. A replicated number (a tensor without dims: a norm, a step size) may come from another
mesh: it is the same number on every rank of its own, and the ranks of the call's mesh compare theirs. So may a tensor
that is replicated and needs no gradient (an index, a mask, a table, which modules keep in a cache for the process) from
a mesh that has all ranks of the call's: there is nothing to compare, and no gradient that would have to get back. Any
other mix is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from attrs import frozen

from shardwise.comm.agreement import raise_unless_equal, refuse_traced
from shardwise.engine.sends import together
from shardwise.errors import MeshMismatchError
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.signature import Kind, Op, Signature, op_name, signature
from shardwise.kernel.spec import TensorSpec

__all__ = ["Lists", "compared", "mesh_of", "on_one_mesh", "only_mesh", "plan_of_lists"]


# -- what comes from another mesh --------------------------------------------------------------------------------------


def only_mesh(cls: Any, values: Sequence[Any]) -> Mesh | None:
    """The mesh of a call whose tensors are all MeshTensors on one mesh; None for any other call."""
    mesh: Mesh | None = None
    for value in values:
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, cls):
                here = part._spec.mesh
                if mesh is not None and here is not mesh:
                    return None
                mesh = here
            elif isinstance(part, torch.Tensor):
                return None
    return mesh


def mesh_of(cls: Any, values: Sequence[Any]) -> Mesh | None:
    """The mesh on which a call runs: that of its first operand that cannot come from another mesh."""
    parts = [t for value in values for t in (value if isinstance(value, (list, tuple)) else (value,))]
    tensors = [t for t in parts if isinstance(t, cls)]
    bound = [t for t in tensors if not _is_number(t._spec)]
    stay = [t for t in bound if not _is_constant(t)] or [t for t in bound if not _is_index(t._spec)]
    return next((t._spec.mesh for t in (*stay, *bound, *tensors)), None)


def on_one_mesh(cls: Any, op: Op, values: Sequence[Any], mesh: Mesh) -> list[Any]:
    """The arguments with a spec on ``mesh`` in place of each that may come from another mesh and is not written."""

    def moved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            parts = [moved(part) for part in value]
            return value if all(map(is_, parts, value)) else parts
        if not isinstance(value, cls) or value._spec.mesh == mesh:
            return value
        if not _is_number(value._spec) and not (_is_constant(value) and _has_all_ranks(value._spec.mesh, mesh)):
            return value
        return TensorSpec(mesh, (REPLICATE,) * mesh.ndim, value._spec.tensor_meta)

    args = signature(op).args
    return [value if arg.written else moved(value) for arg, value in zip(args, values, strict=True)]


def compared(cls: Any, plan: Plan, values: Sequence[Any]) -> Plan:
    """The plan with a comparison, over the ranks of its mesh, of each number that comes from another mesh."""
    moves = plan.redistributes or (None,) * len(plan.schema.signature.tensor_args)
    listed: list[Any] = []
    tensor_values = [v for a, v in zip(plan.schema.signature.args, values, strict=True) if _is_tensor(a.kind)]
    for move, value in zip(moves, tensor_values, strict=True):
        if isinstance(value, (list, tuple)):
            known = dict(move or ())
            steps = {i: _with_comparison(cls, plan, part, known.get(i)) for i, part in enumerate(value)}
            listed.append([(i, step) for i, step in steps.items() if step is not None] or None)
        else:
            listed.append(_with_comparison(cls, plan, value, move))
    redistributes = tuple(listed) if any(move is not None for move in listed) else None
    made = Plan(plan.schema, plan.entry, plan.strategies, redistributes, plan.static, plan.call, plan.full, plan.outs)
    made.after, made.sends = plan.after, plan.sends
    return made


def _with_comparison(cls: Any, plan: Plan, value: Any, move: Callable[..., Any] | None) -> Callable[..., Any] | None:
    mesh = plan.schema.mesh
    if not isinstance(value, cls) or value._spec.mesh == mesh:
        return move
    name = op_name(plan.schema.op)
    if _has_all_ranks(value._spec.mesh, mesh):
        return move if _is_index(value._spec) or _is_number(value._spec) else _without_gradient(mesh, name, move)

    def compare(local: torch.Tensor, tensor: Any) -> torch.Tensor:
        refuse_traced(local, f"use a number of another mesh in {name}")
        raise_unless_equal(
            str(_bits(local).tolist()),
            mesh,  # type: ignore[arg-type]
            f"use a number of {value._spec.mesh} in {name} on {mesh}",
            f"the number {local.item()}",
            "Make the number the same on every rank first, for example by a reduction over the larger mesh.",
        )
        return local if move is None else move(local, tensor)

    return compare


def _without_gradient(mesh: Mesh, name: str, move: Callable[..., Any] | None) -> Callable[..., Any]:
    """A plan is kept for tensors that need a gradient, too: whether this one does is asked at each call."""

    def check(local: torch.Tensor, tensor: Any) -> torch.Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise MeshMismatchError(
                asked=f"run {name}",
                found=f"an argument that needs a gradient lies on {tensor._spec.mesh}, and the call on {mesh}",
                do="Bring both to one mesh: full_tensor() on one, then distribute_tensor on the other's mesh.",
                op=name,
                meshes=(str(tensor._spec.mesh), str(mesh)),
            )
        return local if move is None else move(local, tensor)

    return check


def _bits(number: torch.Tensor) -> torch.Tensor:
    """Integers that are equal where numbers are, NaN included."""
    parts = torch.view_as_real(number) if number.is_complex() else number.reshape(1)
    if parts.is_floating_point():
        parts = parts.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[parts.itemsize])
    return parts.to(torch.int64)


def _is_number(spec: TensorSpec) -> bool:
    return spec.ndim == 0 and spec.is_replicated


def _is_index(spec: TensorSpec) -> bool:
    dtype = spec.tensor_meta.dtype
    return spec.is_replicated and not dtype.is_floating_point and not dtype.is_complex


def _is_constant(tensor: Any) -> bool:
    return tensor._spec.is_replicated and (_is_index(tensor._spec) or not tensor.requires_grad)


def _has_all_ranks(larger: Any, mesh: Any) -> bool:
    if larger.device_type != mesh.device_type:
        return False
    return set(mesh.mesh.flatten().tolist()) <= set(larger.mesh.flatten().tolist())


def _is_tensor(kind: Kind) -> bool:
    return kind in (Kind.TENSOR, Kind.TENSORS)


# -- lists over several meshes -----------------------------------------------------------------------------------------


@frozen
class Lists:
    """The positions of zipped lists by the mesh on which each runs."""

    count: int
    by_mesh: dict[Mesh, list[int]]

    @classmethod
    def of(cls, tensor_class: Any, op: Op, values: Sequence[Any]) -> Lists:
        lists = [v for a, v in zip(signature(op).args, values, strict=True) if a.kind is Kind.TENSORS and v]
        count = max(map(len, lists), default=0)
        by_mesh: dict[Mesh, list[int]] = {}
        default = mesh_of(tensor_class, lists)
        for i in range(count):
            mesh = mesh_of(tensor_class, [v[i] for v in lists if i < len(v)]) or default
            assert mesh is not None
            by_mesh.setdefault(mesh, []).append(i)
        return cls(count, by_mesh)

    def part(self, described: Signature, values: Sequence[Any], at: Sequence[int]) -> list[Any]:
        """The arguments of a call over some positions only, lists of numbers included."""
        return [
            [value[i] for i in at] if arg.is_list and value and len(value) == self.count else value
            for arg, value in zip(described.args, values, strict=True)
        ]


def plan_of_lists(lists: Lists, schema: OpSchema, plans: Sequence[Plan]) -> Plan:
    """One plan of those for the positions on each mesh."""
    places = list(lists.by_mesh.values())
    order = [i for at in places for i in at]
    back = sorted(range(lists.count), key=order.__getitem__)
    strategies = [s for plan in plans for s in plan.strategies]
    outs = [spec for plan in plans for spec in plan.outs]
    runs = [(at, plan) for at, plan in zip(places, plans, strict=True)]
    made = Plan(
        schema,
        plans[0].entry,
        [strategies[k] for k in back],
        None,
        None,
        partial(_run_lists, lists, schema.signature, runs, back),
        False,
        tuple(outs[k] for k in back) if outs else (),
    )
    made.sends = together([plan.sends for plan in plans], schema)
    return made


def _run_lists(
    lists: Lists,
    described: Signature,
    runs: Sequence[tuple[list[int], Plan]],
    back: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> list[Any] | None:
    values = described.bind(args, kwargs)
    results: list[Any] = []
    for at, plan in runs:
        results += _run(plan, described, lists.part(described, values, at)) or ()
    return [results[k] for k in back] if results else None


def _run(plan: Plan, described: Signature, values: list[Any]) -> Any:
    """A plan on local tensors, as a handler runs it."""
    if plan.static is not None:
        replaced = iter(plan.static)
        named = zip(described.args, values, strict=True)
        values = [next(replaced) if a.name in plan.schema.info.by_value else v for a, v in named]
    if plan.redistributes is not None:
        moves = iter(plan.redistributes)
        values = [
            _moved(value, next(moves)) if _is_tensor(a.kind) else value
            for a, value in zip(described.args, values, strict=True)
        ]
    positional, named_values = described.unbind(values)
    return plan.call(*positional, **named_values)


def _moved(value: Any, move: Any) -> Any:
    if move is None or value is None:
        return value
    if not isinstance(value, list):
        return move(value, None)
    steps = dict(move)
    return [steps[i](part, None) if i in steps else part for i, part in enumerate(value)]
