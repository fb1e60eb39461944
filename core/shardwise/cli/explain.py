"""``shardwise explain``: one call's strategies, the one taken, what it communicates, and why the others lost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from shardwise.cli.calls import arguments_of, find_op, parse_arguments, parse_operand
from shardwise.cli.explained import plain, print_explanation
from shardwise.cli.loading import load_module
from shardwise.cli.output import json_option
from shardwise.cost import WIRES, default_links, use_links
from shardwise.explanation import LISTED, Explanation, explain_call
from shardwise.spec import AbstractMesh

__all__ = ["explain"]

TOP = 10
"""Strategies that a person is shown unless told otherwise."""


def _mesh_shape(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
    words = value.lower().split("x")
    if not all(word.isdigit() and int(word) for word in words):
        raise click.BadParameter(f"{value!r} is no mesh: write 4, 2x2, 2x4x2", ctx, param)
    return tuple(map(int, words))


def _wires(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    words = None if value is None else tuple(value.split(","))
    unknown = sorted(set(words or ()) - set(WIRES))
    if unknown:
        raise click.BadParameter(f"there is no {unknown[0]!r}; there are {', '.join(WIRES)}", ctx, param)
    return words


@click.command()
@click.argument("op")
@click.option("--mesh", "mesh_shape", callback=_mesh_shape, required=True, help="Sizes of the mesh dims: 8, or 2x4.")
@click.option("--input", "inputs", multiple=True, help="'f32[8,16] S(0),R', also 'name: ...'; '-' is None.")
@click.option("--arg", "arguments", multiple=True, help="name=value, a Python literal or a dtype.")
@click.option("--device", default="cpu", show_default=True, help="Device type of the mesh; decides what links cost.")
@click.option("--wires", callback=_wires, help=f"What connects the ranks, per mesh dim: {', '.join(WIRES)}.")
@click.option("--import", "imports", multiple=True, metavar="MODULE", help="Import this first: it defines the op.")
@click.option(
    "--top", type=click.IntRange(0), help=f"Strategies to list, 0: all.  [default: {TOP}, with --json {LISTED}]"
)
@json_option
def explain(*, op: str, top: int | None, imports: Sequence[str], as_json: bool, **call: Any) -> None:
    r"""Explain one call of OP, such as aten.mm or acme::kernel: every legal strategy with its cost, the one that is
    taken and what it communicates, and why the others lost. Starts no process.

    \b
    shardwise explain aten.mm --mesh 2x2 --input 'f32[8,16] S(0),R' --input 'f32[16,32] R,R'
    shardwise explain cat --mesh 4 --input 'tensors: f32[4] R' --input 'tensors: f32[2] R' --arg dim=0
    """
    for name in imports:
        load_module(name)
    listed = (LISTED if as_json else TOP) if top is None else top
    found = _explanation(op, limit=listed or None, **call)
    if as_json:
        click.echo(json.dumps(plain(found), indent=1))
    else:
        print_explanation(found)


def _explanation(
    name: str,
    *,
    mesh_shape: tuple[int, ...],
    inputs: Sequence[str],
    arguments: Sequence[str],
    device: str,
    wires: tuple[str, ...] | None,
    limit: int | None,
) -> Explanation:
    mesh = AbstractMesh(mesh_shape, device)
    if wires is not None and len(wires) != mesh.ndim:
        raise click.UsageError(f"--wires names {len(wires)} and the mesh has {mesh.ndim} dims: give one per mesh dim")
    operands = [parse_operand(text, mesh) for text in inputs]
    given = parse_arguments(arguments)
    op = find_op(name, operands, given)
    with _linked(mesh, wires):
        return explain_call(op, (), arguments_of(op, operands, given), limit=limit)


@contextmanager
def _linked(mesh: AbstractMesh, wires: tuple[str, ...] | None) -> Iterator[None]:
    """Cost moves by these wires for a while."""
    use_links(mesh, None if wires is None else default_links(mesh, wires))
    try:
        yield
    finally:
        use_links(mesh, None)
