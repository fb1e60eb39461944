"""Whether the ranks of a mesh were seeded alike, compared before their first draw on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.groups import backend_of
from shardwise.comm.rule_agreement import different_summaries
from shardwise.errors import DifferentSeedsWarning, RankDisagreementError, warn_user
from shardwise.private_torch.fake import is_rehearsing
from shardwise.rng.generator import asked_seed, mode

__all__ = ["compare_seeds"]

_SHOWN = 4  # ranks whose seeds are listed


def compare_seeds(mesh: DeviceMesh, torch_seed: int) -> None:
    """Compare what the ranks of a mesh were seeded with; every rank must call this.

    ``torch_seed`` is that of torch's generator for the mesh's devices. Raises :class:`RankDisagreementError` on every
    rank where :func:`shardwise.manual_seed` was called with different seeds or not by all, or the ranks draw in
    different modes. Warns on every rank where torch's generators have different seeds, as those are ignored.
    """
    if mesh.size() == 1 or is_rehearsing() or backend_of(mesh) == "fake":
        return
    seed = asked_seed()
    asked = "not called" if seed is None else str(seed)
    own = {"seeds": {"shardwise.manual_seed": asked, "mode": mode(), "torch": str(torch_seed)}}
    summaries = different_summaries(mesh, own)
    if summaries is None:
        return
    seeds = {rank: one["seeds"] for rank, one in summaries.items()}
    first = int(mesh.mesh.flatten()[0])
    for what in ("shardwise.manual_seed", "mode"):
        if len({of_rank[what] for of_rank in seeds.values()}) > 1:
            raise _refusal(mesh, what, seeds, first)
    if asked == "not called":
        warn_user(
            f"torch's generators have different seeds on the ranks of the mesh {tuple(mesh.shape)}: "
            f"{_by_rank('torch', seeds)}. Tensors on a mesh are drawn from the generator of its first rank: from here "
            f"on all ranks have the state of rank {first}, and what they draw for themselves is the same too. Seed "
            "torch with the same number on all ranks, and draw a rank's own numbers with a generator= of its own.",
            DifferentSeedsWarning,
        )


def _refusal(mesh: DeviceMesh, what: str, seeds: Mapping[int, Mapping[str, Any]], first: int) -> RankDisagreementError:
    if what == "mode":
        found = f"the ranks draw in different modes: {_by_rank(what, seeds)}"
        do = "Enter shardwise.random.using(...) and set SHARDWISE_RANDOM on all ranks or on none."
    else:
        found = (
            f"shardwise.manual_seed has had different seeds: {_by_rank(what, seeds)}. All ranks draw their parts of "
            f"the same tensor, so one seed must hold, and that of rank {first} would do so silently"
        )
        do = (
            "Call shardwise.manual_seed with the same number on every rank: values differ by their place in the tensor "
            "anyway. A rank's own numbers come from plain torch, with a generator= of its own."
        )
    return RankDisagreementError(
        asked=f"draw random numbers on the mesh {tuple(mesh.shape)} for the first time",
        found=found,
        do=do,
        seeds={rank: of_rank[what] for rank, of_rank in seeds.items()},
    )


def _by_rank(what: str, seeds: Mapping[int, Mapping[str, Any]]) -> str:
    listed = [f"{of_rank[what]} on rank {rank}" for rank, of_rank in seeds.items()]
    rest = len(listed) - _SHOWN
    return ", ".join(listed[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
