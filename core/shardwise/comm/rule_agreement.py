"""The agreement of a mesh's ranks on their rules.

Ranks with different plugins, versions or settings would choose different strategies, issue different collectives and
wait for each other for ever. So each rank makes a summary of its rules. At the first use of a mesh the summaries are
compared, and every rank raises if they differ. A program that overrides a rule later must do so on every rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.groups import backend_of, carrying_device, process_group_of
from shardwise.comm.rank_failures import go_on, watch
from shardwise.comm.waiting_ranks import explained
from shardwise.discovery.frozen_rules import digests_of_modules
from shardwise.discovery.process import default_registry
from shardwise.errors import RankDisagreementError
from shardwise.kernel.first_party import core_version
from shardwise.kernel.mesh import Mesh
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registrar import RuleModule
from shardwise.kernel.registry import Registry
from shardwise.kernel.signature import op_name
from shardwise.kernel.world import PerWorld
from shardwise.private_torch.modes import outside_modes
from shardwise.settings import read_settings

__all__ = [
    "agree_on_asking",
    "agree_on_rules",
    "at_first_use",
    "different_summaries",
    "differences",
    "forget",
    "summary",
]

# A new world has other ranks, which must agree again.
_meshes: set[DeviceMesh] = set()
_agreed = PerWorld(_meshes, _meshes.clear)
# Called before the first op runs on a mesh.
at_first_use: list[Callable[[], object]] = []
Summary = dict[str, dict[str, str]]
# An error lists so many differences and counts the rest.
_SHOWN = 6


def agree_on_rules(mesh: Mesh) -> None:
    """Compare the rules of a mesh's ranks, once per mesh. Every rank must call this.

    Nothing is sent on an abstract mesh, on a mesh of one rank or of fake ranks, or by a rank that is not part of the
    mesh. Raises :class:`RankDisagreementError` on every rank when the rules differ. A rank that cannot load its plugins
    raises the error of that, and the other ranks raise a :class:`RankDisagreementError` with its text.
    """
    if not isinstance(mesh, DeviceMesh) or mesh in _agreed.now():
        return
    if mesh.size() > 1 and mesh.get_coordinate() is not None and backend_of(mesh) != "fake":
        for m in range(mesh.ndim):
            if mesh.size(m) > 1:
                watch(process_group_of(mesh, m))
        # A mesh may be first used under tracing, where a tensor made here would not be real.
        with outside_modes():
            failure: Exception | None = None
            registry: Registry | None = None
            try:
                registry = default_registry()
                own = summary(registry)
            except Exception as error:  # noqa: BLE001  # warnings that a program made errors, too
                # This rank must not raise yet: the others would wait for it.
                failure, own = error, {"failure": {"loading its plugins": f"{type(error).__name__}: {error}"}}
            summaries = different_summaries(
                mesh, own, lambda: own if registry is None else summary(registry, whole=True)
            )
            if failure is not None:
                raise failure
            if summaries is not None:
                raise _disagreement(mesh, summaries)
    # After the agreement: a rank that cannot load its plugins must not raise before the others.
    for callback in tuple(at_first_use):  # one may remove itself
        callback()
    _agreed.now().add(mesh)


def agree_on_asking(mesh: Mesh, op: str, asked: bool) -> None:
    """Compare over a mesh's ranks whether an op without a rule is to run replicated.

    Every rank must call this at each such call, also a rank that will refuse the op: on any rank a context may have
    ended since the last call. Raises :class:`RankDisagreementError` on every rank when they differ.
    """
    if not isinstance(mesh, DeviceMesh):
        return
    if mesh.size() > 1 and mesh.get_coordinate() is not None and backend_of(mesh) != "fake":
        with outside_modes():
            summaries = different_summaries(mesh, {op: {"runs": "replicated" if asked else "not at all"}})
        if summaries is not None:
            runs = {rank: {op: one.get(op, {}).get("runs", "something else")} for rank, one in summaries.items()}
            different = differences("op", runs)
            raise RankDisagreementError(
                asked=f"run {op}, which has no rule",
                found=f"ranks are to do different things: {'; '.join(different)}",
                do="Enter shardwise.replicate_unknown() on every rank, at the same point, or on none",
                differences=tuple(different),
            )


def forget() -> None:
    """Have the ranks of all meshes agree again."""
    _meshes.clear()


def summary(registry: Registry, *, whole: bool = False) -> Summary:
    """The facts that decide a rank's look-ups: versions, plugins that are loaded or failed, the rule of each op.

    It is the same whatever ops a rank has seen. For the modules of rules that are imported when an op of theirs is
    seen, a digest of their files stands; if ``whole``, their rules do.
    """
    rules: dict[str, str] = {}
    later: dict[str, list[Origin]] = {}
    for name, origin in registry.later():
        later.setdefault(name, []).append(origin)
    if whole:
        rules |= {name: f"cannot be had: {why}" for name, why in registry.see_all().items() if name not in later}
    else:
        rules |= _code(registry)
    for op in {entry.op for entry in registry.ops()} if whole else registry.early():
        name = op_name(op)
        if all(entry.origin in later.get(name, ()) for entry in registry.find(op)):
            continue  # got when the op was first seen, which another rank may not have done yet
        winner = registry.resolve(op).winner
        rules[name] = "conflict" if winner is None else f"{winner.origin}: {winner.rule.text}"
    rules |= {
        name: f"{', '.join(map(str, origins))}: got when the op is first seen"
        for name, origins in later.items()
        if name not in rules
    }
    settings = read_settings()
    plugins = {o.plugin: f"{o.distribution} {o.version}" for o in registry.origins}
    plugins |= {f.origin.plugin: f"{f.origin.distribution} {f.origin.version}, failed" for f in registry.failures}
    return {
        "version": {"shardwise": core_version(), "torch": torch.__version__},
        "setting": {
            "unknown-ops": registry.unknown_ops,
            "plain": settings.plain,
            "check-ranks": "on" if settings.check_ranks else "off",
            "keep-moved": str(settings.keep_moved),
            "check-replicas": str(settings.check_replicas),
            "verify": str(settings.verify),
        },
        "plugin": plugins,
        "rule": rules,
    }


def _code(registry: Registry) -> dict[str, str]:
    """By plugin, digests of the packages that have its modules of rules."""
    modules: dict[Origin, list[RuleModule]] = {}
    for module in registry.modules:
        modules.setdefault(module.origin, []).append(module)
    return {f"modules of {o.plugin}": f"{o}: {', '.join(_digests(tuple(own)))}" for o, own in modules.items()}


@lru_cache(maxsize=256)
def _digests(modules: tuple[RuleModule, ...]) -> tuple[str, ...]:
    """The files are read once: one more mesh has the same rules, and a file that was edited since was not imported."""
    return tuple(digests_of_modules(modules))


# -- comparing -------------------------------------------------------------------------------------------------------


def different_summaries(
    mesh: DeviceMesh, own: Summary, whole: Callable[[], Summary] | None = None
) -> dict[int, Summary] | None:
    """The summaries of all ranks of a mesh, by global rank; ``None`` when all are equal.

    ``whole`` makes the summary that is compared where ``own`` differs: the one that says more and costs more.
    """
    digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).digest()
    numbers = [int.from_bytes(digest[i : i + 7], "big") for i in (0, 7, 14)]
    # One reduction for both: the minimum of the negatives is the negative of the maximum.
    extremes = torch.tensor([*numbers, *(-n for n in numbers)], device=carrying_device(mesh))
    go_on()
    for m in range(mesh.ndim):
        if mesh.size(m) > 1:
            with explained(process_group_of(mesh, m)):
                dist.all_reduce(extremes, dist.ReduceOp.MIN, group=process_group_of(mesh, m))
    least, most = extremes.cpu().view(2, -1)
    if torch.equal(least, -most):
        return None
    summaries: dict[int, Summary] = {dist.get_rank(): own if whole is None else whole()}
    for m in range(mesh.ndim):
        parts: list[Any] = [None] * mesh.size(m)
        with explained(process_group_of(mesh, m)):
            dist.all_gather_object(parts, summaries, group=process_group_of(mesh, m))
        summaries = {rank: one for part in parts for rank, one in part.items()}
    if whole is not None and all(one == summaries[dist.get_rank()] for one in summaries.values()):
        return None
    return dict(sorted(summaries.items()))


def _disagreement(mesh: DeviceMesh, summaries: Mapping[int, Summary]) -> RankDisagreementError:
    failed = {rank: one["failure"] for rank, one in summaries.items() if "failure" in one}
    lines = [f"{_ranks([rank])} failed {what}: {why}" for rank, one in failed.items() for what, why in one.items()]
    loaded = {rank: one for rank, one in summaries.items() if rank not in failed}
    for kind in ("version", "setting", "plugin", "rule"):
        lines += differences(kind, {rank: one[kind] for rank, one in loaded.items()})
    rest = len(lines) - _SHOWN
    return RankDisagreementError(
        asked=f"use the mesh {mesh} for the first time",
        found="its ranks do not have the same rules: "
        + "; ".join(lines[:_SHOWN])
        + (f"; and {rest} more" if rest > 0 else ""),
        do="Install the same plugins in the same versions everywhere, and start every rank with the same settings "
        "(`shardwise plugins` and `shardwise doctor` show them)",
        differences=tuple(lines),
    )


def differences(kind: str, by_rank: Mapping[int, Mapping[str, str]]) -> list[str]:
    """A line for each name with different values on different ranks."""
    lines = []
    for name in sorted({name for one in by_rank.values() for name in one}):
        ranks_by_value: dict[str, list[int]] = {}
        for rank, one in by_rank.items():
            ranks_by_value.setdefault(one.get(name, "none"), []).append(rank)
        if len(ranks_by_value) > 1:
            values = ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
            lines.append(f"{kind} {name}: {values}")
    return lines


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
