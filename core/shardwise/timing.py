"""Times that all ranks of a mesh take together, the same numbers on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm import MeshComm

__all__ = ["Tell", "time_together"]

Tell = Callable[[int, int], None]
"""Called with how many visits are done and how many there are."""

VISIT_SECONDS = 0.012
"""How long one visit of a short run repeats it."""

MOST_REPEATS = 12


def time_together(
    mesh: DeviceMesh, runs: Sequence[Callable[[], object]], rounds: int, tell: Tell | None = None
) -> list[float]:
    """Median seconds of each run, of the rank that took longest; all ranks of the mesh must call alike.

    The runs take turns in every round, so that a busy moment of the machine harms each a little and none alone. A first
    round warms up and tells how often a run is repeated per visit.
    """
    finish = _finisher(mesh.device_type)
    visits = len(runs) * (rounds + 1)
    done = 0
    repeats: list[int] = []
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        first = number == 0
        for i, run in enumerate(runs):
            _meet(mesh)
            found = _visit(run, 3 if first else repeats[i], finish)
            if first:
                # The first call makes connections and touches memory for the first time.
                slowest = _slowest(mesh, [min(found[1:])])[0]
                repeats.append(int(min(max(VISIT_SECONDS / slowest, 1), MOST_REPEATS)))
            else:
                times[i] += found
            done += 1
            if tell is not None:
                tell(done, visits)
    return _slowest(mesh, [median(each) for each in times])


def _visit(run: Callable[[], object], repeats: int, finish: Callable[[], None]) -> list[float]:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        finish()
        found.append(time.perf_counter() - start)
    return found


def _finisher(device_type: str) -> Callable[[], None]:
    """What waits until the device has done all that was asked of it."""
    if device_type == "cpu":
        return lambda: None
    wait: Callable[[], None] = torch.get_device_module(device_type).synchronize
    return wait


def _meet(mesh: DeviceMesh) -> None:
    """Let all ranks begin together."""
    _slowest(mesh, [0.0])


def _slowest(mesh: DeviceMesh, seconds: Sequence[float]) -> list[float]:
    """The longest time of any rank for each entry."""
    # Whole nanoseconds: backends take the maximum of integers themselves.
    mine = torch.tensor([max(1, round(s * 1e9)) for s in seconds], device=mesh.device_type)
    longest = MeshComm(mesh).all_reduce(mine, "max", range(mesh.ndim))
    return [n / 1e9 for n in longest.tolist()]
