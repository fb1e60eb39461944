"""Times of runs that all ranks of a mesh make together; every rank gets the same numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.groups import group_of
from shardwise.comm.mesh_comm import MeshComm

__all__ = ["Tell", "time_together"]

Tell = Callable[[int, int], None]
"""``tell(done, total)``: how many visits are done, and how many there are."""

VISIT_SECONDS = 0.012
"""How long one visit of a short run repeats it."""

MOST_REPEATS = 6


def time_together(
    mesh: DeviceMesh, runs: Sequence[Callable[[], object]], rounds: int, tell: Tell | None = None
) -> list[float]:
    """Median seconds of each run until the last rank has finished. Every rank of the mesh must call this.

    All ranks start a run together, and the slowest rank counts, because the next op waits for it. The runs take turns
    in every round, so that a busy moment of the machine affects all of them a little. A first round warms up and
    decides how often a run is repeated per visit.
    """
    # A barrier over the mesh: an exchange, the collective with the fewest rounds.
    group = group_of(mesh, tuple(m for m in range(mesh.ndim) if mesh.size(m) > 1))
    word = torch.zeros(group.size, 1, device=mesh.device_type)
    # Waits until the device has finished all its work.
    synchronize: Callable[[], None] = (
        (lambda: None) if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type).synchronize
    )
    visits = len(runs) * (rounds + 1)
    done = 0
    repeats: list[int] = []
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds + 1):
        first = number == 0
        for i, run in enumerate(runs):
            seconds = []
            for _ in range(3 if first else repeats[i]):
                group.all_to_all(word)
                synchronize()
                start = time.perf_counter()
                run()
                synchronize()
                seconds.append(time.perf_counter() - start)
            if first:
                # The first call makes connections and touches memory for the first time.
                slowest = _slowest(mesh, [min(seconds[1:])])[0]
                repeats.append(int(min(max(VISIT_SECONDS / slowest, 1), MOST_REPEATS)))
            else:
                times[i] += seconds
            done += 1
            if tell is not None:
                tell(done, visits)
    longest = iter(_slowest(mesh, [t for each in times for t in each]))
    return [median([next(longest) for _ in each]) for each in times]


def _slowest(mesh: DeviceMesh, seconds: Sequence[float]) -> list[float]:
    """The longest time of any rank for each entry."""
    # Whole nanoseconds: backends take the maximum of integers themselves.
    mine = torch.tensor([max(1, round(s * 1e9)) for s in seconds], device=mesh.device_type)
    longest = MeshComm(mesh).all_reduce(mine, "max", range(mesh.ndim))
    return [n / 1e9 for n in longest.tolist()]
