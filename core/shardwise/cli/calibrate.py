"""``shardwise calibrate``: measure a mesh, and write the figures that the cost model uses."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import click
import torch.distributed as dist
from attrs import frozen
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh

from shardwise.cli.output import json_option, print_json, print_parts, print_text, progress
from shardwise.cli.tensor_text import read_mesh_shape
from shardwise.kernel.placements import show_all
from shardwise.planning.cost import KINDS
from shardwise.planning.link_file import Calibration, chosen_file, default_file, read, show, store
from shardwise.testing.local import local_backend, local_device, take_device
from shardwise.testing.pool import WorkerPool
from shardwise.tools.calibrate import (
    LARGEST,
    LARGEST_ELSEWHERE,
    SMALLEST,
    time_redistributions,
    typical_pairs,
)
from shardwise.tools.calibrate import calibrate as calibrate_mesh

__all__ = ["calibrate"]


@frozen
class Request:
    """What to measure: tensors of up to ``largest`` bytes on a mesh of this shape; ``out`` gets the figures."""

    mesh_shape: tuple[int, ...]
    device: str
    out: Path
    largest: int

    @property
    def world_size(self) -> int:
        return math.prod(self.mesh_shape)


@frozen
class MeasuredMesh:
    """The figures of a mesh, and redistributions with their predicted and measured times."""

    request: Request
    calibration: Calibration
    redistributions: list[dict[str, object]]


def _shape_of_several_ranks(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    shape = read_mesh_shape(value)
    if shape is None or math.prod(shape) == 1:
        raise click.BadParameter(f"{value!r} is not a mesh of several ranks: write 4, 2x2, 2x4x2", ctx, param)
    return shape


@click.command()
@click.option(
    "--mesh", "mesh_shape", callback=_shape_of_several_ranks, required=True, help="Sizes of the mesh dims: 8, or 2x4."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="The file; default: the one that is read.")
@click.option("--largest", type=click.IntRange(SMALLEST), help="Bytes of the largest tensor to measure with.")
@json_option
def calibrate(
    *, mesh_shape: tuple[int, ...], device: str, out: Path | None, largest: int | None, as_json: bool
) -> None:
    """Measure a mesh for some seconds and write the figures that redistributions are costed by from then on.

    Runs local processes of its own, or under torchrun --nproc-per-node 8 -m shardwise.cli calibrate --mesh 2x4.
    """
    size = math.prod(mesh_shape)
    try:
        device_type = local_device(device, size)
    except ValueError as error:
        raise click.UsageError(f"--device {device}: {error}") from None
    most = largest or LARGEST.get(device_type, LARGEST_ELSEWHERE)
    request = Request(mesh_shape, device_type, (out or chosen_file()[0] or default_file()).absolute(), most)
    if request.out.exists():
        # A file that cannot be read is refused before anything is measured.
        read(request.out)
    if dist.is_torchelastic_launched():
        measured = _measure_under_torchrun(request)
    else:
        try:
            with WorkerPool(request.world_size, local_backend(request.device, request.world_size)) as pool:
                measured = pool.run(run_rank, request, timeout=None)[0]
        finally:
            # Rank 0 hides the cursor while its bar lives, and cannot show it again when it is killed.
            Console(stderr=True).show_cursor()
    if measured is None:
        return
    store(measured.calibration, request.out)
    if as_json:
        figures = json.loads(show([measured.calibration]))
        values = {"file": str(measured.request.out), **figures, "transitions": measured.redistributions}
        print_json(values)
    else:
        table = Table("tensor", "from", "to", "steps", title="Redistributions")
        for heading in ("predicted us", "measured us"):
            table.add_column(heading, justify="right")
        for row in measured.redistributions:
            words = (_escaped(str(row[key])) for key in ("tensor", "from", "to", "steps"))
            table.add_row(*words, *(f"{float(str(row[key])) * 1e6:,.0f}" for key in ("predicted", "measured")))
        print_parts([_figure_table(measured.calibration), table])
        print_text(f"written to {measured.request.out}")


def _measure_under_torchrun(request: Request) -> MeasuredMesh | None:
    started = int(os.environ["WORLD_SIZE"])
    if started != request.world_size:
        shape = "x".join(map(str, request.mesh_shape))
        raise click.UsageError(f"--mesh {shape} wants {request.world_size} processes and torchrun started {started}")
    dist.init_process_group("nccl" if request.device == "cuda" else "gloo")
    try:
        return run_rank(request)
    finally:
        dist.destroy_process_group()


def run_rank(request: Request) -> MeasuredMesh | None:
    """Measure on this rank of the default process group; rank 0 returns the figures, the others None."""
    first = dist.get_rank() == 0
    take_device(request.device, dist.get_rank())
    mesh = init_device_mesh(request.device, request.mesh_shape)
    with progress("measuring", shown=first) as tell:
        calibration = calibrate_mesh(mesh, save=False, largest=request.largest, tell=tell)
    with progress("checking", shown=first) as tell:
        redistributions = time_redistributions(
            mesh, typical_pairs(mesh, max(SMALLEST, request.largest // 16)), tell=tell
        )
    rows: list[dict[str, object]] = [
        {
            "tensor": str(one.src.tensor_meta),
            "from": show_all(one.src.placements),
            "to": show_all(one.dst.placements),
            "steps": "; ".join(f"{step.kind}{list(step.mesh_dims)}" for step in one.planned.steps),
            "predicted": one.predicted,
            "measured": one.seconds,
        }
        for one in redistributions
    ]
    return MeasuredMesh(request, calibration, rows) if first else None


# -- what is printed -------------------------------------------------------------------------------------------------


def _figure_table(calibration: Calibration) -> Table:
    links, site = calibration.links, calibration.site
    table = Table("mesh dim", "ranks", "hosts", "collective", title=_escaped(str(site)))
    for heading in ("start us", "latency us", "GB/s"):
        table.add_column(heading, justify="right")
    places = [(str(m), n, h) for m, (n, h) in enumerate(zip(site.mesh_shape, site.hosts, strict=True)) if n > 1]
    connections = [links.mesh_dims[int(m)] for m, *_ in places]
    if links.whole is not None:
        places.append(("all", math.prod(site.mesh_shape), site.total_hosts))
        connections.append(links.whole)
    for (name, ranks, hosts), connection in zip(places, connections, strict=True):
        for i, kind in enumerate(KINDS):
            head = (name, str(ranks), str(hosts)) if i == 0 else ("", "", "")
            link = connection.of(kind)
            figures = (f"{link.start * 1e6:.1f}", f"{link.latency * 1e6:.1f}", f"{link.bandwidth / 1e9:.2f}")
            table.add_row(*head, kind, *figures, end_section=i == len(KINDS) - 1)
    local = (f"{links.local_start * 1e6:.1f}", "", f"{links.memory_bandwidth / 1e9:.2f}")
    table.add_row("local", "", "", "copy", *local)
    table.add_row("local", "", "", "in its caches", "", "", f"{links.cache_bandwidth / 1e9:.2f}")
    table.add_row("local", "", "", f"product, {links.flops / 1e9:,.0f} Gflop/s", "", "", "")
    return table


def _escaped(text: str) -> str:
    # rich reads [S(0), R] as markup unless the bracket is escaped
    return text.replace("[", r"\[")
