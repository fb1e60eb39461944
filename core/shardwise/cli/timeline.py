"""``shardwise timeline``: what a recorded step waits for, the longest waits first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from attrs import asdict

from shardwise.cli.output import json_option, print_json, print_rows, print_text, refuse_no_folder, refuse_to_overwrite
from shardwise.cli.timeline_svg import svg_of
from shardwise.kernel.whole_files import write_whole
from shardwise.program.amounts import milliseconds, size_text
from shardwise.tools.trace_file import WaitedFor, exposures, read_trace

__all__ = ["timeline"]

_COLUMNS = (
    "exposed",
    "share",
    "measured",
    "predicted",
    "times",
    "bytes",
    "phase",
    "collective",
    "module",
    "why",
    "line",
)
# The first ones go first where a terminal is narrow.
_MAY_GO = ("predicted", "share", "measured", "phase", "module")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--most", type=click.IntRange(1), default=20, show_default=True, help="How many sites to list.")
@click.option("--svg", type=click.Path(path_type=Path, dir_okay=False), help="Draw it into this file, too.")
@json_option
def timeline(*, file: Path, most: int, svg: Path | None, as_json: bool) -> None:
    """List what a program waits for, by the site that sends it: the longest waits first.

    FILE is what `with shardwise.timeline(FILE):` wrote. Sums of all times that the site sent, with repeated layers as
    one: the time that the program waited (exposed), the time from issue to the end (measured), and what the cost model
    predicts.
    """
    refuse_no_folder("--svg", svg)
    refuse_to_overwrite("--svg", svg, b"<svg", "a picture")
    trace = read_trace(file)
    rows = exposures(trace.collectives)
    if svg is not None:
        try:
            write_whole(svg, svg_of(trace.slices, trace.tracks))
        except OSError as error:
            raise click.ClickException(f"cannot write {svg}: {error.strerror}") from error
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    waited = sum(row.exposed for row in rows)
    times = sum(row.times for row in rows)
    print_text(f"{times:,} collectives; the program waited {milliseconds(waited)} for them.")
    if rows:
        click.echo()
        print_rows([_cells(row, waited) for row in rows[:most]], _COLUMNS, drop=_MAY_GO)
    if len(rows) > most:
        rest = sum(row.exposed for row in rows[most:])
        print_text(f"\n{len(rows) - most} more sites with {milliseconds(rest)}: --most {len(rows)} lists them.")


def _cells(row: WaitedFor, waited: float) -> dict[str, Any]:
    return {
        "exposed": milliseconds(row.exposed),
        "share": f"{row.exposed / waited:.0%}" if waited else "-",
        "measured": _seconds(row.measured),
        "predicted": _seconds(row.predicted),
        "times": row.times,
        "bytes": size_text(row.nbytes),
        "phase": row.phase,
        "collective": f"{row.kind} {', '.join(row.mesh_dims)}",
        "module": ", ".join(m or "(no module)" for m in row.modules),
        "why": f"implicit: {row.op}, {row.why}" if row.implicit else row.why,
        "line": ", ".join(row.lines),
    }


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else milliseconds(seconds)
