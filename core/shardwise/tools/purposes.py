"""What a collective is for, as the frames between it and the program say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from attrs import evolve, frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.engine.decided import in_force, look_up
from shardwise.kernel.handlers import HANDLER_FILE
from shardwise.kernel.placements import Placement, show
from shardwise.kernel.plan import Plan
from shardwise.kernel.signature import Kind, op_name
from shardwise.kernel.spec import TensorSpec
from shardwise.planning.strategies import make_call, merged
from shardwise.private_torch.dispatch import leaf_to_accumulate
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.names import name_of

__all__ = ["OF_GRAPH", "Purpose", "mesh_of", "moved_text", "purpose_at"]


OF_GRAPH = "(graph)"
"""The op of a collective that a compiled graph sends."""


@frozen
class Purpose:
    """Who asks for a collective (``op``), and why. Policies on communication are about those that are ``implicit``.

    ``leaf`` is the leaf whose gradient is sent; its name, or ``name``, stands in ``why`` for ``{name}``. ``is_several``
    says that several tensors are sent together, ``is_final`` that frames further out say nothing more.
    """

    op: str = "(none)"
    why: str = "the program calls a collective"
    implicit: bool = False
    leaf: Any = None
    name: str = ""
    module: nn.Module | None = None
    is_several: bool = False
    is_final: bool = False

    def of_event(self, reason: str) -> Purpose:
        """The purpose of an event with a reason: what a plan for the whole step says."""
        return self if not reason else evolve(self, why=reason, implicit=not in_force.is_written)

    @classmethod
    def of_call(cls, handler: FrameType, inner: FrameType | None) -> Purpose:
        """The purpose of what a handler runs; ``inner`` is the frame that it called."""
        values = handler.f_locals
        plan = values.get("plan")
        if not isinstance(plan, Plan):
            op = handler.f_code.co_filename.removeprefix(HANDLER_FILE).rstrip(">")
            return cls(op, "an agreement on a new plan", is_final=True)
        op = op_name(plan.schema.op)
        return cls(op, _why_of_call(op, plan, values, inner), implicit=not _is_decided(plan), is_final=True)


def _is_decided(plan: Plan) -> bool:
    """Whether a plan file says how the call runs: then its moves are written there."""
    if in_force.decisions is None or not in_force.is_written or plan.schema.is_symbolic:
        return False
    metas = tuple(None if spec is None else spec.tensor_meta for spec in plan.outs)
    rule, schema = plan.entry.rule, plan.schema
    return look_up(rule, schema, make_call(rule, schema, metas)) is not None


def _why_of_call(op: str, plan: Plan, values: Mapping[str, Any], inner: FrameType | None) -> str:
    moved = _moved_operand(plan, values, inner)
    if moved is not None:
        return moved
    if inner is not None and inner.f_code.co_filename.endswith("engine/moved_writes.py"):
        return "what it writes is moved and moved back"
    if any(strategy.lowered for strategy in plan.strategies):
        return f"lowering of {op}"
    return f"part of {op}"


def _moved_operand(plan: Plan, values: Mapping[str, Any], inner: FrameType | None) -> str | None:
    """The operand that a handler moves now, and from where to where."""
    if inner is None or not inner.f_code.co_filename.endswith(("engine/shared_moves.py", "engine/make_plan.py")):
        return None
    tensor = inner.f_locals.get("tensor", inner.f_locals.get("_tensor"))
    if tensor is None:
        return None
    schema, targets = plan.schema, merged(plan.schema, plan.strategies)[0]
    for k, arg in enumerate(schema.signature.args):
        value = values.get(f"a{k}")
        at = values.get("i") if arg.kind is Kind.TENSORS else 0
        if arg.kind is Kind.TENSORS and isinstance(value, (list, tuple)) and isinstance(at, int) and at < len(value):
            value = value[at]
        if value is tensor and isinstance(at, int):
            flat = schema.starts[k] + at
            src, dst = schema.specs[flat], targets[flat]
            if src is not None and dst is not None and src.placements != dst.placements:
                return f"operand `{arg.name}` is moved {moved_text(src, dst.placements)}"
    return "an operand is moved"


def moved_text(src: TensorSpec, dst: Sequence[Placement]) -> str:
    """From where to where a tensor is moved, on the mesh dims that change: ``tp S(0) -> R; pod, dp P(sum) -> R``."""
    names = getattr(src.mesh, "mesh_dim_names", None) or [f"dim{m}" for m in range(src.mesh.ndim)]
    changes: dict[str, list[str]] = {}
    for name, before, after in zip(names, src.placements, dst, strict=True):
        if before != after:
            changes.setdefault(f"{show(before)} -> {show(after)}", []).append(name)
    return "; ".join(f"{', '.join(dims)} {change}" for change, dims in changes.items()) or "in place"


# -- frames of shardwise ---------------------------------------------------------------------------------------------

_AGREEMENTS = (
    "comm/agreement.py",
    "comm/rule_agreement.py",
    "comm/link_agreement.py",
    "comm/layout_agreement.py",
    "comm/contents.py",
)
_DISTRIBUTING = ("checkpoint/", "tensor/distribute.py", "tensor/dcp_")
_CALLS = {"full_tensor", "redistribute", "to_local", "from_local", "to_dtensor", "from_dtensor"}


def purpose_at(file: str, frame: FrameType, before: Purpose) -> Purpose:
    """What a frame of shardwise says of the collective below it; ``before`` is what frames further in said."""
    name = frame.f_code.co_name
    if file in _AGREEMENTS:
        return Purpose("(agreement)", "the ranks compare what they have", is_final=True)
    if file == "comm/graph_calls.py":
        return Purpose(OF_GRAPH, "a compiled graph sends it", is_final=True)
    if file.startswith(_DISTRIBUTING):
        return evolve(before, op=name.strip("_"), why=f"{name.strip('_')}() of the program")
    read = _FILES.get(file)
    return before if read is None else read(name, frame, before)


def _of_coalescing(name: str, _frame: FrameType, before: Purpose) -> Purpose:
    return evolve(before, is_several=True) if name == "issue" else before


def _of_autograd(name: str, frame: FrameType, before: Purpose) -> Purpose:
    """A redistribution, of the program or of a gradient."""
    if name == "backward":
        return Purpose("(gradient)", f"gradient of {before.why}", is_final=True)
    tensor, target = frame.f_locals.get("tensor"), frame.f_locals.get("target")
    if name == "_run" and isinstance(tensor, MeshTensor) and isinstance(target, TensorSpec):
        return evolve(before, op="redistribute", why=f"redistribute(): {moved_text(tensor._spec, target.placements)}")
    return before


def _of_gradient(name: str, frame: FrameType, before: Purpose) -> Purpose:
    if name != "keep_layout":
        return before
    grad, spec, leaf = frame.f_locals.get("grad"), frame.f_locals.get("spec"), leaf_to_accumulate()
    text = "to its layout"
    if isinstance(spec, TensorSpec) and isinstance(grad, MeshTensor):
        text = f"to its layout: {moved_text(grad._spec, spec.placements)}"
    why = f"gradient of `{{name}}` is brought {text}"
    return Purpose("(gradient)", why, leaf=leaf if leaf is not None else grad, name=_name(leaf), is_final=True)


def _of_late_gradient(_function: str, frame: FrameType, before: Purpose) -> Purpose:
    if before.is_several:
        return Purpose("(gradient)", "gradients that waited are brought to their layouts", is_final=True)
    leaf = frame.f_locals.get("leaf")
    why = "gradient of `{name}`, which waited, is brought to its layout"
    return Purpose("(gradient)", why, leaf=leaf, name=_name(leaf), is_final=leaf is not None)


def _of_prefetch(name: str, frame: FrameType, before: Purpose) -> Purpose:
    if name == "backward":
        return Purpose("(gradient)", "gradients of prefetched parameters are brought to their layouts", is_final=True)
    unit = getattr(frame.f_locals.get("self"), "module", None)
    if name == "start" and isinstance(unit, nn.Module):
        return Purpose("prefetch", "parameters are gathered ahead of their use", module=unit, is_final=True)
    return before


def _of_method(name: str, frame: FrameType, before: Purpose) -> Purpose:
    """A method of MeshTensor that the program called, perhaps by way of others."""
    if name == "_only":
        what = str(frame.f_locals.get("what"))
        return evolve(before, op=what, why=f"{what} needs it whole", implicit=True)
    if name == "full_tensor" or (name in _CALLS and before.op == "(none)"):
        return evolve(before, op=name, why=f"{name}() of the program")
    return before


def _name(leaf: Any) -> str:
    return name_of(leaf) if leaf is not None else ""


def mesh_of(file: str, frame: FrameType) -> Any:
    """The mesh with names that a frame works on; None if it does not say."""
    values = list(frame.f_locals.values())
    if file == "tensor/prefetch.py":
        values += list(getattr(frame.f_locals.get("self"), "copies", {}).values())
        values = [getattr(value, "spec", value) for value in values]
    for value in values:
        mesh: Any = value
        if isinstance(value, Plan):
            mesh = value.schema.mesh
        elif isinstance(value, MeshTensor):
            mesh = value._spec.mesh
        elif isinstance(value, TensorSpec):
            mesh = value.mesh
        if isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names:
            return mesh
    return None


_FILES: dict[str, Callable[[str, FrameType, Purpose], Purpose]] = {
    "comm/coalescing.py": _of_coalescing,
    "tensor/autograd.py": _of_autograd,
    "tensor/late_grads.py": _of_late_gradient,
    "tensor/leaf_grads.py": _of_gradient,
    "tensor/mesh_tensor.py": _of_method,
    "tensor/prefetch.py": _of_prefetch,
}
