"""The run on the mesh compared with the run on one device: losses and parameters, with fixed tolerances."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import frozen
from torch import Tensor

from shardwise.demo.settings import RunSettings
from shardwise.demo.training import Step

__all__ = ["Comparison", "Difference", "compare"]

LOSS_TOLERANCE = 1e-4
"""Nats per byte. Training once in float32 and once in float64 on one device gives 5e-7 over the default run."""

PARAMETER_TOLERANCE = 0.1
"""Optimizer steps: this times the learning rate. Float32 against float64 gives 0.01 over the default run."""


@frozen
class Difference:
    """The largest absolute difference of one kind, where it was seen, and what is allowed."""

    what: str
    where: str
    value: float
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether the difference is allowed; not-a-number is not."""
        return self.value <= self.tolerance


@frozen
class Comparison:
    """All differences of a run."""

    differences: tuple[Difference, ...]

    @property
    def agrees(self) -> bool:
        """Whether every difference is within its tolerance."""
        return all(difference.within for difference in self.differences)


def compare(
    settings: RunSettings,
    mesh: tuple[Sequence[Step], Mapping[str, Tensor]],
    single: tuple[Sequence[Step], Mapping[str, Tensor]],
) -> Comparison:
    """Compare two runs, each given as its steps and its final parameters (whole tensors by name)."""
    (mesh_steps, mesh_parameters), (single_steps, single_parameters) = mesh, single
    losses = {f"step {a.number}": abs(a.loss - b.loss) for a, b in zip(mesh_steps, single_steps, strict=True)}
    norms = {f"step {a.number}": abs(a.norm - b.norm) / b.norm for a, b in zip(mesh_steps, single_steps, strict=True)}
    parameters = {name: (mesh_parameters[name] - whole).abs().max().item() for name, whole in single_parameters.items()}
    return Comparison(
        (
            _largest("loss", losses, LOSS_TOLERANCE),
            _largest("gradient norm (relative)", norms, LOSS_TOLERANCE),
            _largest("parameter", parameters, PARAMETER_TOLERANCE * settings.learning_rate),
        )
    )


def _largest(what: str, differences: Mapping[str, float], tolerance: float) -> Difference:
    # A not-a-number compares false with everything: it must be the largest.
    where = max(differences, key=lambda name: math.inf if math.isnan(differences[name]) else differences[name])
    return Difference(what, where, differences[where], tolerance)
