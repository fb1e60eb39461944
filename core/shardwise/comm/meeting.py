"""A mesh is met once: at its first use its ranks agree on everything that later plans rest on."""

from __future__ import annotations

from shardwise.comm.link_agreement import agree_on_links
from shardwise.comm.rule_agreement import agree_on_rules
from shardwise.kernel.spec import Mesh

__all__ = ["meet"]


def meet(mesh: Mesh) -> None:
    """Have the ranks of a mesh agree on their rules and on the figures that redistributions are costed by, once.

    Every rank of the mesh must call this at the same point of the program. It is called where a tensor is put on a
    mesh, before a call is planned, and before a redistribution is prepared. Nothing is sent on an abstract mesh, on a
    mesh of one rank or of fake ranks, or by a rank that is not part of the mesh.

    Raises on every rank: :class:`RankDisagreementError` when the rules differ, and :class:`LinksFileError`,
    :class:`LinksVersionError` or :class:`LinksFitError` when the first rank's file of link figures cannot be used.
    """
    agree_on_rules(mesh)
    agree_on_links(mesh)
