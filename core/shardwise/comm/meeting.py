"""The first use of a mesh: its ranks agree on everything that later plans depend on."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.link_agreement import agree_on_links
from shardwise.comm.policy import know_mesh, start_by_settings
from shardwise.comm.rule_agreement import agree_on_rules
from shardwise.kernel.mesh import Mesh, own_coordinate

__all__ = ["meet"]


def meet(mesh: Mesh) -> None:
    """Have the ranks of a mesh agree on their rules and on the figures for costs, once.

    Every rank of the mesh must call this at the same point of the program: when a tensor is put on a mesh, before a
    call is planned, and before a redistribution is prepared. Nothing is sent on an abstract mesh, on a mesh of one rank
    or of fake ranks. Raises :class:`OffMeshError` on a rank that is not on the mesh.

    Raises on every rank: :class:`RankDisagreementError` when the rules differ, and :class:`LinksFileError`,
    :class:`LinksVersionError` or :class:`LinksFitError` when the first rank's file of link figures cannot be used.
    """
    if isinstance(mesh, DeviceMesh):
        own_coordinate(mesh)
    start_by_settings()
    know_mesh(mesh)
    agree_on_rules(mesh)
    agree_on_links(mesh)
