"""The command: options in, four local processes (or torchrun's) at work, a report and an exit code out."""

from __future__ import annotations

import errno
import json
import math
from pathlib import Path

import click
import torch.distributed as dist
from attrs import evolve
from rich.console import Console

from shardwise.comm.rank_failures import telling
from shardwise.demo.checkpoints import Checkpoints, after_a_failure, check_run
from shardwise.demo.report import as_json, print_report
from shardwise.demo.run import RunResult, run_rank
from shardwise.demo.settings import MESH_NAMES, RunSettings
from shardwise.errors import CheckpointError, WorkerError
from shardwise.kernel.foreign_files import reason
from shardwise.kernel.whole_files import write_whole
from shardwise.testing.local import local_backend, local_device
from shardwise.testing.pool import WorkerPool

__all__ = ["demo"]

DEFAULT = RunSettings()
DIFFERS, WORKER_FAILED = 1, 3
"""Exit codes; 2 is click's, for options that make no sense."""

REPORT_WIDTH = 140
"""Columns of a report that goes to a file or a pipe."""


def _mesh_shape(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    words = value.lower().split("x")
    if not all(word.isdigit() and int(word) for word in words) or len(words) not in MESH_NAMES:
        raise click.BadParameter(
            f"{value!r} is not a mesh: write 4 (tensor parallel) or 2x2 (data x tensor)", ctx, param
        )
    return tuple(map(int, words))


@click.command()
@click.option("--mesh", callback=_mesh_shape, default=DEFAULT.mesh_text, show_default=True, help="4, or 2x2 (dp x tp).")
@click.option("--steps", type=click.IntRange(1), default=DEFAULT.steps, show_default=True)
@click.option("--seed", type=int, default=DEFAULT.seed, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Report to a file too.")
@click.option("--layers", type=click.IntRange(1), default=DEFAULT.layers, show_default=True)
@click.option("--width", type=click.IntRange(1), default=DEFAULT.width, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=DEFAULT.heads, show_default=True)
@click.option("--context", type=click.IntRange(1), default=DEFAULT.context, show_default=True, help="Bytes a sequence.")
@click.option("--batch", type=click.IntRange(1), default=DEFAULT.batch, show_default=True, help="Sequences a step.")
@click.option("--learning-rate", type=click.FloatRange(0, 1), default=DEFAULT.learning_rate, show_default=True)
@click.option("--learn/--no-learn", default=DEFAULT.learn, show_default=True, help="Decide for a step as a whole.")
@click.option(
    "--checkpoint-dir", type=click.Path(path_type=Path, file_okay=False), help="Save here, and go on from it."
)
@click.option("--checkpoint-every", type=click.IntRange(1), default=10, show_default=True, help="Steps.")
def demo(
    json_path: Path | None, device: str, checkpoint_dir: Path | None, checkpoint_every: int, **sizes: object
) -> None:
    """Train a byte-level GPT on a mesh of local processes, then on one device, and compare the two.

    Runs its own processes, or under torchrun --nproc-per-node 4 -m shardwise.demo. Exits with 1 when the runs differ
    and with 3 when a worker fails. With --checkpoint-dir, the same command goes on from the last checkpoint, on any
    --mesh.
    """
    if json_path is not None and not json_path.absolute().parent.is_dir():
        raise click.UsageError(f"--json {json_path}: there is no folder {json_path.absolute().parent}")
    if math.isnan(sizes["learning_rate"]):  # type: ignore[arg-type]
        raise click.UsageError("--learning-rate is not a number")
    settings = RunSettings(**sizes)  # type: ignore[arg-type]
    if settings.width % settings.heads:
        raise click.UsageError(f"--width {settings.width} does not divide into --heads {settings.heads}")
    try:
        settings = evolve(settings, device=local_device(device, settings.world_size))
    except ValueError as error:
        raise click.UsageError(f"--device {device}: {error}") from None
    checkpoints = None
    if checkpoint_dir is not None:
        try:
            check_run(checkpoint_dir, settings)
        except CheckpointError as error:
            raise click.UsageError(str(error)) from None
        checkpoints = Checkpoints(checkpoint_dir.absolute(), checkpoint_every)
    run = _run_under_torchrun if dist.is_torchelastic_launched() else _run_locally
    result = run(settings, checkpoints)
    if result is None:
        return
    # A pipe has no width of its own, and 80 columns would cut the strategies.
    console = Console()
    print_report(result, console if console.is_terminal else Console(width=REPORT_WIDTH))
    if json_path is not None:
        try:
            write_whole(json_path, json.dumps(as_json(result), indent=1) + "\n")
        except OSError as error:
            raise click.ClickException(f"cannot write {json_path}: {reason(error)}") from error
    if not result.comparison.agrees:
        raise SystemExit(DIFFERS)


def _run_locally(settings: RunSettings, checkpoints: Checkpoints | None) -> RunResult | None:
    try:
        with WorkerPool(settings.world_size, local_backend(settings.device, settings.world_size)) as pool:
            result: RunResult | None = pool.run(run_rank, settings, checkpoints, timeout=None)[0]
            return result
    except WorkerError as error:
        cause = error.__cause__
        if checkpoints is None and isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
            raise cause from None  # the command ends as it does where it prints itself
        click.echo(f"\nshardwise demo: {error}", err=True)
        if checkpoints is not None:
            click.echo(f"\n{after_a_failure(checkpoints.directory)}", err=True)
        raise SystemExit(WORKER_FAILED) from None
    finally:
        # Rank 0 hides the cursor while its bar lives, and cannot show it again when it is killed.
        Console().show_cursor()


def _run_under_torchrun(settings: RunSettings, checkpoints: Checkpoints | None) -> RunResult | None:
    dist.init_process_group("nccl" if settings.device == "cuda" else "gloo")
    try:
        if dist.get_world_size() != settings.world_size:
            raise click.UsageError(
                f"--mesh {settings.mesh_text} wants {settings.world_size} processes and torchrun started "
                f"{dist.get_world_size()}"
            )
        return telling(run_rank)(settings, checkpoints)
    finally:
        dist.destroy_process_group()
