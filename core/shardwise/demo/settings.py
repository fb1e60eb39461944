"""What a demo run is asked to do."""

from __future__ import annotations

import math

from attrs import asdict, frozen

__all__ = ["MESH_NAMES", "RunSettings"]

MESH_NAMES: dict[int, tuple[str, ...]] = {1: ("tp",), 2: ("dp", "tp")}
"""The names of the mesh dims by their number; a mesh of one dim is all tensor-parallel."""


@frozen
class RunSettings:
    """One run: the mesh, the model's sizes, and how long and on what it trains.

    ``batch`` counts sequences and ``context`` bytes per sequence. With ``learn`` the mesh runs by what was decided for
    the first step as a whole, from the second on. The defaults train in well under 90 s on two cores.
    """

    mesh: tuple[int, ...] = (2, 2)
    steps: int = 60
    seed: int = 0
    device: str = "cpu"
    layers: int = 4
    width: int = 128
    heads: int = 4
    context: int = 128
    batch: int = 8
    learning_rate: float = 1e-3
    learn: bool = True

    @property
    def world_size(self) -> int:
        """The number of processes, one per mesh entry."""
        return math.prod(self.mesh)

    @property
    def mesh_names(self) -> tuple[str, ...]:
        """One name per mesh dim."""
        return MESH_NAMES[len(self.mesh)]

    @property
    def mesh_text(self) -> str:
        """The mesh as on the command line: ``2x2``."""
        return "x".join(map(str, self.mesh))

    @property
    def tokens_per_step(self) -> int:
        """Bytes that one step learns from."""
        return self.batch * self.context

    def as_json(self) -> dict[str, object]:
        """Plain values for ``--json``."""
        return {**asdict(self), "mesh": list(self.mesh), "mesh_names": list(self.mesh_names)}
