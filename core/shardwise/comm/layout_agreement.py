"""The agreement of a mesh's ranks on a tensor that each of them makes from its own part.

Ranks whose parts imply different global shapes would send messages of sizes that the receivers do not expect. Then gloo
ends the process, or waits for ever. So the ranks compare the first tensor of each layout. A later tensor with the same
layout sends nothing.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.groups import backend_of
from shardwise.comm.rank_failures import all_say
from shardwise.comm.rule_agreement import differences, different_summaries
from shardwise.errors import RankDisagreementError
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.world import PerWorld
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.modes import outside_modes

__all__ = ["agree_on_layout", "agree_on_plan"]

_MOST = 4096  # layouts of a mesh that are remembered; then all of them are forgotten, at the same call on every rank
_layouts: set[TensorSpec] = set()
# A rank may be on meshes that other ranks are not on, so each mesh counts for itself.
_of_mesh: dict[DeviceMesh, set[TensorSpec]] = {}


def _forget() -> None:
    _layouts.clear()
    _of_mesh.clear()


_agreed = PerWorld(_layouts, _forget)


def agree_on_layout(spec: TensorSpec, function: str, shape: str = "") -> None:
    """Compare over a mesh's ranks the layout of a tensor that they make together by a function, once per layout.

    ``shape`` is the function's argument for the global shape, if it was not passed. Raises
    :class:`RankDisagreementError` on every rank if they differ.
    """
    mesh = spec.mesh
    if not isinstance(mesh, DeviceMesh) or spec in _agreed.now() or is_rehearsing():
        return
    if mesh.size() == 1 or mesh.get_coordinate() is None or backend_of(mesh) == "fake":
        return
    text = f"{spec}, strides {spec.stride}"
    with outside_modes():
        is_same = all_say(function, f"the layout {text}", mesh.mesh.flatten().tolist())
        layouts = None if is_same else different_summaries(mesh, {"tensor": {"layout": text}})
    if layouts is not None:
        different = differences("its", {rank: one["tensor"] for rank, one in layouts.items()})
        raise RankDisagreementError(
            asked=f"make a MeshTensor by {function}",
            found=f"the ranks of the mesh do not agree: {'; '.join(different)}",
            do=f"Pass the global {shape}= where the parts of the ranks differ in size, and the same placements and "
            "dtype on every rank."
            if shape
            else "Pass the same global shape, placements and dtype on every rank.",
            differences=tuple(different),
        )
    of_mesh = _of_mesh.setdefault(mesh, set())
    if len(of_mesh) >= _MOST:
        _layouts.difference_update(of_mesh)
        of_mesh.clear()
    of_mesh.add(spec)
    _layouts.add(spec)


def agree_on_plan(mesh: DeviceMesh, file: str, decisions: str) -> None:
    """Compare over a mesh's ranks the digests of a plan for the whole step. Every rank must call this.

    Raises :class:`RankDisagreementError` on every rank if they differ.
    """
    if mesh.size() == 1 or mesh.get_coordinate() is None or is_rehearsing() or backend_of(mesh) == "fake":
        return
    with outside_modes():
        digests = different_summaries(mesh, {"plan": {"plan": file, "decisions": decisions}})
    if digests is not None:
        different = differences("its", {rank: one["plan"] for rank, one in digests.items()})
        raise RankDisagreementError(
            asked="distribute a module by a plan",
            found=f"the ranks of the mesh have different plans: {'; '.join(different)}",
            do="Give every rank the same plan file and the decisions beside it.",
            differences=tuple(different),
        )
