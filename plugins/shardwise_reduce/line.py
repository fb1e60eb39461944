"""The shards of one dim, in their order: what lowerings along a sharded dim ask of each other."""

from __future__ import annotations

from math import prod

import torch

from shardwise.rule import LocalCall

__all__ = ["Line", "along_of", "line_of"]


class Line:
    """The ranks that share one dim of ``self``: how long each one's part is, and which one this rank is."""

    __slots__ = ("at", "lengths", "mesh_dims", "place")

    def __init__(self, local: LocalCall) -> None:
        spec = local.spec("self")
        self.at = along_of(local)
        self.mesh_dims = local.sharding(spec, self.at)
        sizes = [spec.mesh_shape[m] for m in self.mesh_dims]
        self.lengths: list[int] = []
        self.place = 0
        for rank in range(prod(sizes)):
            there, left = list(local.coordinate), rank
            for m, n in zip(reversed(self.mesh_dims), reversed(sizes), strict=True):
                left, there[m] = divmod(left, n)
            if tuple(there) == tuple(local.coordinate):
                self.place = rank
            self.lengths.append(spec.local_shape_and_offset(tuple(there))[0][self.at])

    def gather(self, local: LocalCall, part: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """Every rank's part, in the order of the shards; they differ in their length along the dim only."""
        shapes = [[n if d == self.at else size for d, size in enumerate(part.shape)] for n in lengths]
        return local.comm.all_to_all([part] * len(lengths), self.mesh_dims, shapes)


def along_of(local: LocalCall) -> int:
    """The dim that a call works along, counted from the front."""
    ndim: int = local.call.args["self"].ndim
    return int(local.call.args["dim"]) % max(1, ndim)


def line_of(local: LocalCall) -> Line:
    """The line of a call, worked out once per plan."""
    return local.once(Line)
