"""``shardwise explain``: the strategies of one call, the chosen one, its collectives, and why the others lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import torch
from attrs import evolve

from shardwise.cli.call_text import arguments_of, find_op, parse_arguments, parse_operand
from shardwise.cli.completion import offer_ops
from shardwise.cli.explanation_json import as_json_values
from shardwise.cli.explanation_text import print_explanation
from shardwise.cli.modules import import_option
from shardwise.cli.output import json_option, print_json
from shardwise.cli.tensor_text import mesh_option_shape
from shardwise.errors import LinksFitError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.plurals import counted
from shardwise.planning.cost import WIRES, Links, default_links, use_links
from shardwise.planning.link_file import links_for, read
from shardwise.tools.explain import LISTED, explain_call

__all__ = ["explain"]

TOP = 10
"""How many strategies are printed by default."""


def _wires(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    words = None if value is None else tuple(value.split(","))
    unknown = sorted(set(words or ()) - set(WIRES))
    if unknown:
        raise click.BadParameter(f"there is no {unknown[0]!r}; there are {', '.join(WIRES)}", ctx, param)
    return words


def _device_type(ctx: click.Context, param: click.Parameter, value: str) -> str:
    try:
        return torch.device(value).type
    except RuntimeError:
        raise click.BadParameter(f"torch knows no device {value!r}; write cpu or cuda", ctx, param) from None


@click.command()
@click.argument("op", shell_complete=offer_ops)
@click.option(
    "--mesh", "mesh_shape", callback=mesh_option_shape, required=True, help="Sizes of the mesh dims: 8, or 2x4."
)
@click.option("--input", "inputs", multiple=True, help="'f32[8,16] S(0),R', also 'name: ...'; '-' is None.")
@click.option("--arg", "arguments", multiple=True, help="name=value, a Python literal or a dtype.")
@click.option(
    "--device",
    default="cpu",
    callback=_device_type,
    show_default=True,
    help="Device type of the mesh; decides what links cost.",
)
@click.option("--wires", callback=_wires, help=f"What connects the ranks, per mesh dim: {', '.join(WIRES)}.")
@click.option(
    "--links", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Figures of shardwise calibrate."
)
@import_option
@click.option(
    "--top", type=click.IntRange(0), help=f"Strategies to list, 0: all.  [default: {TOP}, with --json {LISTED}]"
)
@json_option
def explain(*, op: str, top: int | None, as_json: bool, **call: Any) -> None:
    """Explain one call of OP, such as aten.mm or acme::kernel: every legal strategy with its cost, the one that is
    taken and what it communicates, and why the others lost. Starts no process.

    \b
    shardwise explain aten.mm --mesh 2x2 \\
        --input 'f32[8,16] S(0),R' \\
        --input 'f32[16,32] R,R'
    shardwise explain cat --mesh 4 \\
        --arg dim=0 \\
        --input 'tensors: f32[4] R' \\
        --input 'tensors: f32[2] R'
    """  # noqa: D301  # the backspace is click's mark for lines that stay as they are
    listed = (LISTED if as_json else TOP) if top is None else top
    mesh = AbstractMesh(call["mesh_shape"], call["device"])
    links, figures = _links(mesh, call["wires"], call["links"])
    operands = [parse_operand(text, mesh) for text in call["inputs"]]
    values = parse_arguments(call["arguments"])
    overload = find_op(op, operands, values)
    arguments = arguments_of(overload, operands, values)
    use_links(mesh, links)
    try:
        explanation = explain_call(overload, (), arguments, limit=listed or None)
    finally:
        use_links(mesh, None)
    if as_json:
        print_json({**as_json_values(explanation), "figures": figures})
    else:
        print_explanation(explanation, figures)


# -- the figures behind the costs ------------------------------------------------------------------------------------


def _links(mesh: AbstractMesh, wires: tuple[str, ...] | None, path: Path | None) -> tuple[Links, str]:
    """The figures and their description."""
    if path is not None and wires is not None:
        raise click.UsageError("--links and --wires both say what redistributions cost: give one of them")
    if wires is not None and len(wires) != mesh.ndim:
        raise click.UsageError(
            f"--wires has {counted(len(wires), 'name')} and the mesh {counted(mesh.ndim, 'dim')}: give one per mesh dim"
        )
    if path is None:
        return default_links(mesh, wires), f"defaults for {', '.join(wires) if wires else 'one host'}"
    # The figures that a program would use from the file on such a mesh on one host.
    entries = read(path)
    for entry in entries:
        site = evolve(entry.site, mesh_shape=mesh.shape, hosts=(1,) * mesh.ndim, total_hosts=1)
        like = entry.links if entry.site.mesh_shape == mesh.shape else links_for(entries, site)
        if entry.site.device_type == mesh.device_type and like is not None:
            return like, f"measured on {entry.site}, {entry.date}"
    shape = "x".join(map(str, mesh.shape))
    raise LinksFitError(
        asked=f"cost redistributions on a {mesh.device_type} mesh {shape} by {path}",
        found=f"it has figures for {'; '.join(str(e.site) for e in entries) or 'no mesh'}",
        do="Measure such a mesh with `shardwise calibrate`, or leave --links out.",
        path=str(path),
    )
