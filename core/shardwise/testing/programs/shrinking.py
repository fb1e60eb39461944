"""Shrink a program that fails, to the smallest one that fails, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from attrs import evolve
from torch import Tensor

from shardwise.kernel.factors import has_factors
from shardwise.kernel.placements import REPLICATE, Placement, is_strided, shard, shard_dim
from shardwise.testing.programs.machine import reference
from shardwise.testing.programs.program import Assign, Leaf, Line, Move, Program, is_drawn, operands_of
from shardwise.testing.values import made

__all__ = ["shrink"]

_MOST_TRIES = 120
_FEW = 4


def shrink(program: Program, is_wrong: Callable[[Program], bool], tries: int = _MOST_TRIES) -> Program:
    """A program with fewer calls, simpler leaves and fewer placements for which ``is_wrong`` holds, too.

    A call is replaced by leaves that hold its results. So in the end little more than the one wrong call is left.
    """
    again = True
    while again:
        again = False
        for smaller in _smaller(program):
            if tries == 0:
                return program
            if not _runs_on_one_device(smaller):
                continue
            tries -= 1
            if is_wrong(smaller):
                program, again = smaller, True
                break
    return program


def _runs_on_one_device(program: Program) -> bool:
    try:
        reference(program)
    except Exception:  # noqa: BLE001  a program that one device refuses is no evidence
        return False
    return True


def _smaller(program: Program) -> Iterator[Program]:
    if program.backward:
        yield evolve(program, backward=())
    if program.grad and not program.backward:
        yield evolve(program, grad=False)
    # Without the last line, and without each line that other lines do not need.
    lines = program.lines
    followed = {name for name, _ in program.backward}
    for i in reversed(range(len(lines))):
        later = lines[i + 1 :]
        needed = followed | {name for line in later for name in operands_of(line)}
        if not needed.intersection(lines[i].names):
            yield evolve(program, lines=(*lines[:i], *lines[i + 1 :]))
    yield from _with_leaves_for_results(program)
    yield from _with_simpler_lines(program)


def _with_leaves_for_results(program: Program) -> Iterator[Program]:
    """The program with leaves in place of a line's results, for each line."""
    try:
        after, _ = reference(program)
    except Exception:  # noqa: BLE001
        return
    whole = (REPLICATE,) * len(program.mesh_shape)
    for i in reversed(range(len(program.lines))):
        line = program.lines[i]
        if isinstance(line, (Leaf, Assign)):
            continue
        if isinstance(line, Move):
            leaves = [Leaf(line.name, after[i].values[line.name], line.placements)]
        else:
            leaves = [Leaf(n, after[i].values[n], whole) for n in line.names if n in after[i].values]
        yield evolve(program, lines=(*program.lines[:i], *leaves, *program.lines[i + 1 :]))


def _with_simpler_lines(program: Program) -> Iterator[Program]:
    """The program on a mesh of one dim; with a plain shard for a strided one; with one more replicated placement; with
    the values of one leaf rounded.
    """
    ranks = int(torch.tensor(program.mesh_shape).prod())
    for m in range(len(program.mesh_shape)) if len(program.mesh_shape) > 1 else ():
        lines = tuple(
            _placed(line, (line.placements[m],), (ranks,)) if isinstance(line, (Leaf, Move)) else line
            for line in program.lines
        )
        backward = tuple((n, (p[m],)) for n, p in program.backward)
        yield evolve(program, mesh_shape=(ranks,), lines=lines, backward=backward)
    for i, line in enumerate(program.lines):
        if not isinstance(line, (Leaf, Move)):
            continue
        if is_strided(line.placements):
            yield _with_line(program, i, evolve(line, placements=_plain(line.placements)))
        for m, placement in enumerate(line.placements):
            if placement is not REPLICATE:
                placements = (*line.placements[:m], REPLICATE, *line.placements[m + 1 :])
                yield _with_line(program, i, _placed(line, placements, program.mesh_shape))
    for i, line in enumerate(program.lines):
        if isinstance(line, Leaf):
            for value in _rounded_values(line):
                yield _with_line(program, i, evolve(line, value=value))


def _placed(line: Leaf | Move, placements: tuple[Placement, ...], mesh_shape: tuple[int, ...]) -> Leaf | Move:
    """A line with other placements; strided ones become plain where they may not fit the tensor any more."""
    fits = isinstance(line, Leaf) and has_factors(line.value.shape, placements, mesh_shape)
    return evolve(line, placements=placements if fits else _plain(placements))


def _plain(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    return tuple(p if (d := shard_dim(p)) is None else shard(d) for p in placements)


def _with_line(program: Program, i: int, line: Line) -> Program:
    return evolve(program, lines=(*program.lines[:i], line, *program.lines[i + 1 :]))


def _rounded_values(leaf: Leaf) -> Iterator[Tensor]:
    """Values that are shorter to write."""
    value = leaf.value
    if not value.is_floating_point() or value.dtype.itemsize == 1 or is_drawn(leaf):
        return
    if value.numel() > _FEW:
        yield made(value.shape, value.dtype, leaf.name)
    for decimals in (0, 1):
        short = torch.round(value, decimals=decimals)
        if not torch.equal(short, value) and not bool(short.isnan().any()):
            yield torch.empty_like(value).copy_(short)
