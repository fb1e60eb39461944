"""What the ranks agree on before they make MeshTensors of the results of a local function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.groups import backend_of
from shardwise.comm.rule_agreement import differences, different_summaries
from shardwise.errors import LocalResultError
from shardwise.kernel.engine import tensor_class
from shardwise.kernel.mesh import AbstractMesh, coordinates
from shardwise.kernel.placements import Placement, check_placements, shard_dim, show_all
from shardwise.kernel.plurals import counted
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.modes import outside_modes

__all__ = ["Agreed", "agree", "fault_of", "global_shape"]

Layout = tuple[Placement, ...]


class Agreed(NamedTuple):  # dynamo traces named tuples
    """Of a result: the global shape, ``None`` where all parts have one shape, and whether it has a gradient."""

    shape: tuple[int, ...] | None
    has_gradient: bool


def agree(
    function: str, mesh: DeviceMesh, results: Sequence[tuple[Any, Layout | None]], fault: str, do: str
) -> list[Agreed]:
    """Compare the results of all ranks of a mesh; every rank must call this. ``fault`` is what this rank found wrong.

    Raises :class:`LocalResultError` on every rank for a fault of any, for results of which the ranks have different
    numbers or dtypes, and for parts that do not lie as their placements say.
    """
    own = {f"result {i}": _facts(value) for i, (value, _) in enumerate(results)}
    if fault:
        own["fault"] = {"fault": fault}
    asked = f"take the results of {function} by local"
    with outside_modes():
        alone = mesh.size() == 1 or is_rehearsing() or backend_of(mesh) == "fake"
        summaries = None if alone else different_summaries(mesh, own)
    by_rank = {0: own} if summaries is None else summaries
    faults = {rank: one["fault"]["fault"] for rank, one in by_rank.items() if "fault" in one}
    if faults:
        at = "" if summaries is None else f"on rank {min(faults)}: "
        raise LocalResultError(asked=asked, found=f"{at}{faults[min(faults)]}", do=do, ranks=tuple(faults))
    if summaries is None:
        return [Agreed(None, isinstance(value, torch.Tensor) and value.requires_grad) for value, _ in results]
    wrong = differences("number of results", {rank: {"": str(len(one))} for rank, one in summaries.items()})
    if wrong:
        raise LocalResultError(asked=asked, found=wrong[0].replace(" :", ":"), do=do, differences=tuple(wrong))
    return [_agreed(asked, mesh, f"result {i}", layout, summaries) for i, (_, layout) in enumerate(results)]


def _facts(value: Any) -> dict[str, str]:
    if not isinstance(value, torch.Tensor):
        return {"kind": type(value).__name__}
    dtype = str(value.dtype).removeprefix("torch.")
    gradient = "yes" if value.requires_grad else "no"
    return {"kind": "tensor", "dtype": dtype, "shape": ",".join(map(str, value.shape)), "gradient": gradient}


def _agreed(
    asked: str,
    mesh: DeviceMesh,
    name: str,
    layout: Layout | None,
    summaries: Mapping[int, Mapping[str, Mapping[str, str]]],
) -> Agreed:
    facts = {rank: one.get(name, {"kind": "none"}) for rank, one in summaries.items()}
    wrong = [
        line
        for kind in ("kind", "dtype")
        for line in differences(name, {rank: {kind: one.get(kind, "none")} for rank, one in facts.items()})
    ]
    if wrong:
        raise LocalResultError(
            asked=asked,
            found=f"the ranks return different things: {'; '.join(wrong)}",
            do="Return the same number of results, with the same dtypes, on every rank.",
            differences=tuple(wrong),
        )
    if layout is None:
        return Agreed(None, False)
    has_gradient = any(one["gradient"] == "yes" for one in facts.values())
    shapes = [tuple(int(n) for n in facts[rank]["shape"].split(",") if n) for rank in mesh.mesh.flatten().tolist()]
    if len(set(shapes)) == 1:
        return Agreed(None, has_gradient)
    return Agreed(global_shape(asked, name, tuple(mesh.shape), layout, shapes), has_gradient)


def global_shape(
    asked: str, name: str, mesh_shape: Sequence[int], layout: Layout, shapes: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """The shape of the tensor of which the ranks, in row-major order, have parts of these shapes.

    Raises :class:`LocalResultError` for parts that no tensor has under these placements.
    """
    ndim = len(shapes[0])
    by_coordinate = dict(zip(coordinates(mesh_shape), map(tuple, shapes), strict=True))
    fault = f"the parts have {sorted({len(s) for s in shapes})} dims"
    if all(len(shape) == ndim for shape in shapes):
        checked = check_placements(layout, len(mesh_shape), ndim)
        sharding = [{m for m, p in enumerate(checked) if shard_dim(p) == d} for d in range(ndim)]
        whole = tuple(
            sum(
                shape[d]
                for at, shape in by_coordinate.items()
                if all(c == 0 for m, c in enumerate(at) if m not in sharding[d])
            )
            for d in range(ndim)
        )
        spec = TensorSpec(AbstractMesh(mesh_shape), checked, TensorMeta.contiguous(whole, torch.float32))
        wrong = next((at for at, shape in by_coordinate.items() if shape != spec.local_shape(at)), None)
        if wrong is None:
            return whole
        fault = (
            f"the rank at {wrong} has a part of shape {by_coordinate[wrong]}, and {show_all(checked)} gives it "
            f"{spec.local_shape(wrong)} of a tensor of shape {whole}"
        )
    raise LocalResultError(
        asked=asked,
        found=f"{name}: {fault}",
        do="Parts are split as torch.chunk splits. Return parts of these shapes, or say other placements in outputs=.",
        shapes=tuple(map(tuple, shapes)),
    )


def fault_of(flat: Sequence[Any], layouts: Sequence[Layout | None]) -> str:
    """What is wrong with the results of this rank; empty where nothing is."""
    if len(flat) != len(layouts):
        return f"it returns {counted(len(flat), 'value')}, and {len(layouts)} at an earlier call of this kind"
    for i, (value, layout) in enumerate(zip(flat, layouts, strict=True)):
        if isinstance(value, tensor_class()):
            return f"result {i} is a MeshTensor {show_all(value.placements)}, not a part of this rank"
        if isinstance(value, torch.Tensor) and layout is None:
            return f"result {i} is a tensor {tuple(value.shape)}, and outputs= has no placements for it"
        if not isinstance(value, torch.Tensor) and layout is not None:
            return f"result {i} is a {type(value).__name__}, no tensor, and outputs= says {show_all(layout)}"
    return ""
