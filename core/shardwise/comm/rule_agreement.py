"""The agreement of a mesh's ranks on their rules.

Ranks with other plugins, versions or settings would choose other strategies and wait for each other in collectives that
never meet. So each rank sums up what its look-ups will answer, the sums are compared where a mesh is first used, and
ranks that differ all raise. Rules that a program overrides later are its own affair: it must do so on every rank alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.groups import backend_of, carrying_device
from shardwise.discovery.process import default_registry
from shardwise.errors import RankDisagreementError
from shardwise.kernel.registry import Registry
from shardwise.kernel.signature import op_name
from shardwise.kernel.spec import Mesh
from shardwise.kernel.world import PerWorld
from shardwise.private_torch.tracing import outside_modes

__all__ = ["agree_on_asking", "agree_on_rules", "at_first_use", "forget", "summary"]

# A new start of torch.distributed has other ranks, which agree anew.
_meshes: set[DeviceMesh] = set()
_agreed = PerWorld(_meshes, _meshes.clear)
# What must be there before the first op runs on a mesh.
at_first_use: list[Callable[[], object]] = []
Summary = dict[str, dict[str, str]]
# Enough to see what is wrong; the rest is counted.
_SHOWN = 6


def agree_on_rules(mesh: Mesh) -> None:
    """Compare over a mesh's ranks what their look-ups will answer, once per mesh; all its ranks must come by.

    Nothing is sent on an abstract mesh, a mesh of one rank, or one that this rank is not part of. Raises
    :class:`RankDisagreementError` on every rank when they differ; where one could not load its plugins it raises what
    that gave, and the others a :class:`RankDisagreementError` that tells of it.
    """
    if not isinstance(mesh, DeviceMesh) or mesh in _agreed.now():
        return
    if mesh.size() > 1 and mesh.get_coordinate() is not None and backend_of(mesh) != "fake":
        # Meshes are first used under tracing too, where a tensor made here would not be real.
        with outside_modes():
            _agree(mesh)
    # Behind the agreement: a rank that cannot load its plugins must not leave alone.
    for callback in at_first_use:
        callback()
    _agreed.now().add(mesh)


def agree_on_asking(mesh: Mesh, op: str, asked: bool) -> None:
    """Compare over a mesh's ranks whether an op without a rule is to run replicated.

    All ranks must come by, also those that are about to refuse, and at each such call: on any rank a context may have
    ended since the last one. Raises :class:`RankDisagreementError` on every rank when they differ.
    """
    if not isinstance(mesh, DeviceMesh):
        return
    if mesh.size() > 1 and mesh.get_coordinate() is not None and backend_of(mesh) != "fake":
        with outside_modes():
            mine: Summary = {op: {"runs": "replicated" if asked else "not at all"}}
            told = None if _are_alike(mesh, mine) else _all(mesh, mine)
        if told is not None:
            raise _asked_differently(op, told)


def _asked_differently(op: str, told: Mapping[int, Summary]) -> RankDisagreementError:
    different = _differences(
        "op", {rank: {op: one.get(op, {}).get("runs", "something else")} for rank, one in told.items()}
    )
    return RankDisagreementError(
        asked=f"run {op}, which has no rule",
        found=f"ranks are to do different things: {'; '.join(different)}",
        do="Enter shardwise.replicate_unknown() on every rank, at the same point, or on none",
        differences=tuple(different),
    )


def forget() -> None:
    """Let all meshes agree anew."""
    _meshes.clear()


def _agree(mesh: DeviceMesh) -> None:
    failure: Exception | None = None
    try:
        mine = summary(default_registry())
    except Exception as error:  # noqa: BLE001  # warnings that a program made errors, too
        # This rank alone must not leave: the others would wait for it.
        failure, mine = error, {"failure": {"loading its plugins": f"{type(error).__name__}: {error}"}}
    told = None if _are_alike(mesh, mine) else _all(mesh, mine)
    if failure is not None:
        raise failure
    if told is not None:
        raise _refusal(mesh, told)


def summary(registry: Registry) -> Summary:
    """What decides a rank's answers: versions, plugins that are loaded or failed, and the rule that holds per op."""
    rules = {}
    for resolution in map(registry.resolve, {entry.op for entry in registry.ops()}):
        winner = resolution.winner
        rules[op_name(resolution.op)] = "conflict" if winner is None else f"{winner.origin}: {winner.rule.text}"
    plugins = {o.plugin: f"{o.distribution} {o.version}" for o in registry.origins}
    plugins |= {f.origin.plugin: f"{f.origin.distribution} {f.origin.version}, failed" for f in registry.failures}
    return {
        "version": {"shardwise": version("shardwise"), "torch": torch.__version__},
        "setting": {"unknown-ops": registry.unknown_ops},
        "plugin": plugins,
        "rule": rules,
    }


# -- comparing -------------------------------------------------------------------------------------------------------


def _are_alike(mesh: DeviceMesh, mine: Summary) -> bool:
    digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).digest()
    numbers = [int.from_bytes(digest[i : i + 7], "big") for i in (0, 7, 14)]
    # The least of a number and of its negative are the least and the most of all ranks.
    found = torch.tensor([*numbers, *(-n for n in numbers)], device=carrying_device(mesh))
    for m in range(mesh.ndim):
        if mesh.size(m) > 1:
            dist.all_reduce(found, dist.ReduceOp.MIN, group=mesh.get_group(m))
    least, most = found.cpu().view(2, -1)
    return torch.equal(least, -most)


def _all(mesh: DeviceMesh, mine: Summary) -> dict[int, Summary]:
    """The summaries of all ranks of a mesh, by global rank."""
    found: dict[int, Summary] = {dist.get_rank(): mine}
    for m in range(mesh.ndim):
        parts: list[Any] = [None] * mesh.size(m)
        dist.all_gather_object(parts, found, group=mesh.get_group(m))
        found = {rank: told for part in parts for rank, told in part.items()}
    return dict(sorted(found.items()))


def _refusal(mesh: DeviceMesh, told: Mapping[int, Summary]) -> RankDisagreementError:
    failed = {rank: one["failure"] for rank, one in told.items() if "failure" in one}
    different = [f"{_ranks([rank])} failed {what}: {why}" for rank, one in failed.items() for what, why in one.items()]
    loaded = {rank: one for rank, one in told.items() if rank not in failed}
    for kind in ("version", "setting", "plugin", "rule"):
        different += _differences(kind, {rank: one[kind] for rank, one in loaded.items()})
    rest = len(different) - _SHOWN
    return RankDisagreementError(
        asked=f"use the mesh {mesh} for the first time",
        found="its ranks do not have the same rules: "
        + "; ".join(different[:_SHOWN])
        + (f"; and {rest} more" if rest > 0 else ""),
        do="Install the same plugins in the same versions everywhere, and start every rank with the same settings "
        "(`shardwise plugins` and `shardwise doctor` show them)",
        differences=tuple(different),
    )


def _differences(kind: str, told: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A line for each name that ranks tell different things of."""
    found = []
    for name in sorted({name for one in told.values() for name in one}):
        by_value: dict[str, list[int]] = {}
        for rank, one in told.items():
            by_value.setdefault(one.get(name, "none"), []).append(rank)
        if len(by_value) > 1:
            shown = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in by_value.items())
            found.append(f"{kind} {name}: {shown}")
    return found


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
