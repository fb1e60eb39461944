"""Calibration: measure a mesh, fit the cost model to the times, and use the figures from then on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial as bound
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.group import Group
from shardwise.comm.groups import group_of
from shardwise.comm.link_agreement import Ground, agree_to, from_first, locate
from shardwise.comm.packing import copied
from shardwise.comm.redistribute import runner
from shardwise.errors import LinksFileError, LinksFitError, LinksVersionError
from shardwise.kernel.arguments import check_mesh
from shardwise.kernel.placements import REPLICATE, Placement, partial, shard
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.cost import default_links
from shardwise.planning.link_file import Calibration, chosen_file, default_file, store
from shardwise.planning.path import Path as LayoutPath
from shardwise.planning.path import shortest_path
from shardwise.tools.fit import Point, fit_links
from shardwise.tools.timing import Tell, time_together

__all__ = ["TimedRedistribution", "calibrate", "time_redistributions", "typical_pairs"]

ROUNDS = 3
SMALLEST = 4096
LARGEST = {"cpu": 1 << 24}
LARGEST_ELSEWHERE = 1 << 26
"""Bytes of the whole tensors that are moved, from the smallest to the largest by factors of ``GROWTH``."""

GROWTH = 8


@frozen
class Probe:
    """A run to time: a kind of collective over mesh dims, or a copy (no mesh dims), and its bytes in the cost model."""

    kind: str
    mesh_dims: tuple[int, ...]
    nbytes: float
    run: Callable[[], object]


def calibrate(
    mesh: DeviceMesh,
    path: str | Path | None = None,
    *,
    save: bool = True,
    largest: int | None = None,
    rounds: int = ROUNDS,
    tell: Tell | None = None,
) -> Calibration:
    """Measure a mesh, and use the figures for its costs from now on. Every rank of the mesh must call this.

    Takes seconds. Each kind of collective is timed over each mesh dim alone and over all of them, as it is executed,
    with tensors of up to ``largest`` bytes; so are local copies, a product and a sum. All ranks get the same figures.
    Plans that were made before do not change.
    With ``save`` the mesh's first rank writes the figures to ``path``, by default the file that is read from then on
    (docs/cost-model.md); ``tell(done, total)`` is called with the progress.

    Raises :class:`LinksFitError` for a mesh of one rank, and on every rank what
    :func:`shardwise.planning.link_file.store` raises.
    """
    check_mesh("calibrate a mesh", mesh, "mesh")
    if mesh.size() == 1:
        raise LinksFitError(
            asked="calibrate a mesh", found="it has one rank, which never communicates", do="Calibrate a larger mesh."
        )
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "torch": torch.__version__}
    ground = locate(mesh, about)
    sizes = [SMALLEST]
    while sizes[-1] * GROWTH <= (largest or LARGEST.get(mesh.device_type, LARGEST_ELSEWHERE)):
        sizes.append(sizes[-1] * GROWTH)
    probes = [probe for nbytes in sizes for probe in _probes(mesh, nbytes)]
    times = time_together(mesh, [probe.run for probe in probes], rounds, tell)
    collectives, copies = _points(probes, times, ground)
    links = evolve(fit_links(tuple(mesh.shape), collectives, copies), **_work(mesh, rounds))
    calibration = Calibration(ground.site, links, ground.facts["torch"], ground.facts["date"])
    agree_to(mesh, links)
    if save:
        _save(mesh, calibration, path)
    return calibration


def _points(
    probes: Sequence[Probe], times: Sequence[float], ground: Ground
) -> tuple[dict[tuple[str, tuple[int, ...]], list[Point]], list[Point]]:
    """Bytes and seconds of each kind of collective over each group, and of copies.

    Inside one host's memory, mesh dims of the same size share their times.
    """
    sizes, wires = ground.site.mesh_shape, ground.wires
    collectives: dict[tuple[str, tuple[int, ...]], list[Point]] = {}
    for probe, seconds in zip(probes, times, strict=True):
        groups = [probe.mesh_dims]
        if len(probe.mesh_dims) == 1 and wires[probe.mesh_dims[0]] == "loopback":
            size = sizes[probe.mesh_dims[0]]
            groups = [(m,) for m in range(len(sizes)) if sizes[m] == size and wires[m] == "loopback"]
        for dims in groups:
            collectives.setdefault((probe.kind, dims), []).append((probe.nbytes, seconds))
    return collectives, collectives.pop(("copy", ()))


def _save(mesh: DeviceMesh, calibration: Calibration, path: str | Path | None) -> None:
    """Write the file on the first rank; every rank raises its failure."""
    failed: dict[str, str] = {}
    if not any(mesh.get_coordinate() or ()):
        try:
            store(calibration, Path(path) if path is not None else chosen_file()[0] or default_file())
        except (LinksFileError, LinksVersionError) as error:
            failed = {"type": type(error).__name__, "asked": error.asked, "found": error.found, "do": error.do}
    failed = from_first(mesh, failed)
    if failed:
        kind = LinksVersionError if failed.pop("type") == LinksVersionError.__name__ else LinksFileError
        raise kind(**failed)


# -- what is measured ------------------------------------------------------------------------------------------------


def _probes(mesh: DeviceMesh, nbytes: int) -> Iterator[Probe]:
    """Collectives over each mesh dim and over all of them, and copies, of tensors of ``nbytes``."""
    real = [m for m in range(mesh.ndim) if mesh.size(m) > 1]
    for dims in [(m,) for m in real] + ([tuple(real)] if len(real) > 1 else []):
        yield from _collectives(group_of(mesh, dims), nbytes, mesh.device_type)
    # Half of a tensor by rows, and by columns: slices, fills and rearrangements are of both kinds.
    rows = 32
    width = max(1, nbytes // (4 * rows))
    block = torch.ones(2 * rows, width, device=mesh.device_type)
    columns = torch.ones(rows, 2 * width, device=mesh.device_type)
    copied_bytes = block.nbytes // 2
    yield Probe("copy", (), copied_bytes, lambda: copied(block.narrow(0, rows, rows)))
    yield Probe("copy", (), copied_bytes, lambda: copied(columns.narrow(1, width, width)))


def _collectives(group: Group, nbytes: int, device_type: str) -> Iterator[Probe]:
    """One probe of each kind: what a redistribution of a float tensor of ``nbytes`` runs if each shard is one block."""
    n, dims = group.size, group.mesh_dims
    length = max(1, nbytes // (4 * n))
    pieces = torch.ones(n, length, device=device_type)
    piece = pieces[0].clone()
    piece_bytes, received = piece.nbytes, (n - 1) * piece.nbytes

    yield Probe("all_gather", dims, received, lambda: group.all_gather(piece))
    yield Probe("reduce_scatter", dims, received, lambda: group.start_reduce_scatter(pieces, "sum").wait())
    # Twice the bytes: the reduced pieces are gathered again. A redistribution does not change its input.
    yield Probe("all_reduce", dims, 2 * (n - 1) * piece_bytes, lambda: group.all_reduce_(pieces.clone(), "sum"))
    yield Probe("all_to_all", dims, received, lambda: group.all_to_all(pieces))


def _work(mesh: DeviceMesh, rounds: int) -> dict[str, Any]:
    """What a rank computes, and how fast it reads and writes what its caches hold, while the others do the same."""
    side = 512 if mesh.device_type == "cpu" else 4096
    square = torch.ones(side, side, device=mesh.device_type)
    cache_bytes = default_links(mesh).cache_bytes
    small = torch.ones(max(cache_bytes // 64, 1 << 18), device=mesh.device_type)
    product, total = time_together(mesh, [lambda: square @ square, lambda: small + small], rounds)
    return {
        "flops": 2.0 * side**3 / product,
        "cache_bytes": cache_bytes,
        "cache_bandwidth": 3.0 * small.nbytes / total,
    }


# -- predicted and measured ------------------------------------------------------------------------------------------


@frozen
class TimedRedistribution:
    """One redistribution: its predicted and its measured seconds."""

    src: TensorSpec
    dst: TensorSpec
    planned: LayoutPath
    seconds: float

    @property
    def predicted(self) -> float:
        return self.planned.cost


def time_redistributions(
    mesh: DeviceMesh, pairs: Sequence[tuple[TensorSpec, TensorSpec]], rounds: int = ROUNDS, tell: Tell | None = None
) -> list[TimedRedistribution]:
    """Run redistributions and compare their times with the cost model. Every rank of the mesh must call this."""
    runs = [
        bound(runner(src, dst), torch.ones(src.local_shape(), dtype=src.dtype, device=src.mesh.device_type))
        for src, dst in pairs
    ]
    times = time_together(mesh, runs, rounds, tell)
    return [
        TimedRedistribution(src, dst, shortest_path(src, dst), t) for (src, dst), t in zip(pairs, times, strict=True)
    ]


def typical_pairs(mesh: DeviceMesh, nbytes: int) -> list[tuple[TensorSpec, TensorSpec]]:
    """A handful of redistributions of a float tensor of about ``nbytes``: each kind of step on each mesh dim."""
    side = max(mesh.size(), math.isqrt(nbytes // 4))
    meta = TensorMeta.contiguous((side, side), torch.float32)
    both: list[tuple[Placement, Placement]] = [
        (partial("sum"), REPLICATE),
        (partial("sum"), shard(0)),
        (shard(0), REPLICATE),
        (shard(0), shard(1)),
        (REPLICATE, shard(0)),
    ]
    return [
        (_spec_on(mesh, m, before, meta), _spec_on(mesh, m, after, meta))
        for m in range(mesh.ndim)
        for before, after in both
        if mesh.size(m) > 1
    ]


def _spec_on(mesh: DeviceMesh, mesh_dim: int, placement: Placement, meta: TensorMeta) -> TensorSpec:
    """The spec with this placement on one mesh dim, replicated on the others."""
    return TensorSpec(mesh, tuple(placement if m == mesh_dim else REPLICATE for m in range(mesh.ndim)), meta)
