"""The shards of one dim, in order: how long they are, and how ranks send each other parts of them."""

from __future__ import annotations

from math import prod

import torch

from shardwise.rule import LocalCall, dim_of

__all__ = ["Line", "line_of"]


class Line:
    """The ranks that share one dim of ``self``: the length of each rank's part, and this rank's place among them."""

    __slots__ = ("at", "lengths", "mesh_dims", "place")

    def __init__(self, local: LocalCall) -> None:
        spec = local.spec("self")
        self.at = dim_of(local.call.args["dim"], spec.ndim)
        self.mesh_dims = local.sharding(spec, self.at)
        sizes = [spec.mesh_shape[m] for m in self.mesh_dims]
        self.lengths: list[int] = []
        self.place = 0
        for rank in range(prod(sizes)):
            coordinate, left = list(local.coordinate), rank
            for m, n in zip(reversed(self.mesh_dims), reversed(sizes), strict=True):
                left, coordinate[m] = divmod(left, n)
            if tuple(coordinate) == tuple(local.coordinate):
                self.place = rank
            self.lengths.append(spec.local_shape_and_offset(tuple(coordinate))[0][self.at])

    def gather(self, local: LocalCall, part: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
        """Every rank's part, in the order of the shards. Parts differ only in their length along the dim."""
        shapes = [[n if d == self.at else size for d, size in enumerate(part.shape)] for n in lengths]
        return local.comm.all_to_all([part] * len(lengths), self.mesh_dims, shapes)


def line_of(local: LocalCall) -> Line:
    """The line of a call, computed once per plan."""
    return local.once(Line)
