"""Pictures of layouts. Which rank has which element is asked of shardwise, not drawn by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from svg_canvas import Picture
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise.kernel.placements import Partial, Placement, Replicate, Shard, show_all
from shardwise.rule import AbstractMesh, TensorMeta, TensorSpec
from shardwise.tensor.shards import scatter_local

R, S, P = Replicate(), Shard, Partial()
CELL = 14


def elements(shape: tuple[int, ...], mesh: tuple[int, ...], placements: Sequence[Placement]) -> list[list[int]]:
    """By rank, the numbers of the elements that it has."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    kept = [R if isinstance(p, Partial) else p for p in placements]
    spec = TensorSpec(AbstractMesh(mesh), tuple(kept), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    where = torch.cartesian_prod(*(torch.arange(n) for n in mesh)).view(-1, len(mesh)).tolist()
    return [scatter_local(whole, spec, at).flatten().tolist() for at in where]


def grid(
    picture: Picture, x: float, y: float, has: Sequence[int], fills: Sequence[str], *, side: int = 4, sign: str = ""
) -> None:
    """A square tensor: the elements that a rank has are filled, the others are not."""
    for e in range(side * side):
        at = (x + CELL * (e % side), y + CELL * (e // side))
        picture.box(*at, CELL, CELL, fills[e] if e in has else "empty", round_=0)
        if sign and e in has:
            picture.text(at[0] + CELL / 2, at[1] + CELL - 3.5, sign, size=9, kind="soft", at="middle")


def placements() -> Picture:
    """One tensor of 4 x 4 elements on a mesh of 2 x 2 ranks."""
    picture = Picture(760, 436, "A tensor of 4 x 4 elements on a 2 x 2 mesh under six lists of placements")
    panels: list[tuple[list[Placement], str]] = [
        ([S(0), R], "rows cut over dp, copies over tp"),
        ([R, S(1)], "columns cut over tp, copies over dp"),
        ([S(0), S(1)], "both cut: a quarter each"),
        ([S(0), S(0)], "rows cut twice, dp first"),
        ([R, R], "the whole on every rank"),
        ([S(0), P], "rows cut; to be summed over tp"),
    ]
    for number, (layout, says) in enumerate(panels):
        x, y = 20 + 246 * (number % 3), 34 + 212 * (number // 3)
        picture.text(x, y, show_all(layout), size=14, kind="accent mono strong")
        picture.text(x, y + 18, says, size=11.5, kind="soft", room=244)
        for rank, has in enumerate(elements((4, 4), (2, 2), layout)):
            at = (x + 54 + 78 * (rank % 2), y + 34 + 74 * (rank // 2))
            fill = "sum" if P in layout else f"r{rank}"
            grid(picture, *at, has, [fill] * 16, sign="+" if P in layout else "")
        for i in range(2):
            picture.text(x + 44, y + 66 + 74 * i, f"dp {i}", size=11.5, kind="soft", at="end")
        for i in range(2):
            picture.text(x + 82 + 78 * i, y + 179, f"tp {i}", size=11.5, kind="soft", at="middle")
    return picture


def nested_cuts() -> Picture:
    """A dim of 8 that several mesh dims cut, and one that is cut inside."""
    picture = Picture(760, 338, "How a dim of eight elements is cut once, twice, unevenly and inside")
    bars: list[tuple[str, int, tuple[int, ...], list[Placement], str]] = [
        ("one mesh dim", 8, (4,), [S(0)], "pieces of 2, in the order of the ranks"),
        ("two mesh dims", 8, (2, 2), [S(0), S(0)], "halved over the first mesh dim, each half over the second"),
        ("uneven", 10, (4,), [S(0)], "pieces of ceil(10 / 4) = 3, the last one is smaller"),
        (
            "inside",
            8,
            (4,),
            [_StridedShard(0, split_factor=2)],
            "two sequences of 4, one behind the other: each is cut",
        ),
    ]
    for number, (name, size, mesh, layout, says) in enumerate(bars):
        y = 22 + 80 * number
        picture.text(20, y + 14, name, size=13, kind="ink strong")
        picture.text(20, y + 33, show_all(layout), size=13, kind="accent mono")
        owner = {e: rank for rank, has in enumerate(elements((size,), mesh, layout)) for e in has}
        for e in range(size):
            picture.box(170 + 52 * e, y, 52, 32, f"r{owner[e]}", round_=0)
            picture.text(196 + 52 * e, y + 21, f"rank {owner[e]}", size=11, at="middle")
        picture.text(170, y + 50, says, size=12, kind="soft")
    return picture


def redistribution() -> Picture:
    """What each rank has before and after each kind of step."""
    picture = Picture(790, 590, "What each of four ranks has before and after each step of a redistribution")
    steps: list[tuple[str, Placement, Placement, list[str]]] = [
        ("all-gather", S(0), R, ["every rank sends its shard to all"]),
        ("reduce-scatter", P, S(0), ["sends three pieces of its part,", "keeps the sum of one"]),
        ("all-reduce", P, R, ["the sum of all parts, on every rank"]),
        ("all-to-all", S(0), S(1), ["sends three pieces of its shard"]),
        ("slice", R, S(0), ["sends nothing: keeps its piece"]),
        ("fill", R, P, ["sends nothing: the value on one", "rank, zeros on the others"]),
    ]
    picture.text(383, 24, "before: ranks 0 to 3", size=12, kind="soft", at="middle")
    picture.text(655, 24, "after", size=12, kind="soft", at="middle")
    for number, (name, before, after, says) in enumerate(steps):
        y = 40 + 92 * number
        picture.text(20, y + 20, name, size=14, kind="ink strong")
        picture.text(20, y + 40, f"{show_all([before])[1:-1]} → {show_all([after])[1:-1]}", kind="accent mono")
        picture.lines(20, y + 58, says, step=15, size=11.5, kind="soft", room=236)
        picture.arrow((509, y + 28), (529, y + 28))
        had = elements((4, 4), (4,), [before])
        owner = [f"r{next(r for r in range(4) if e in had[r])}" for e in range(16)]
        for rank, (first, last) in enumerate(zip(had, elements((4, 4), (4,), [after]), strict=True)):
            is_part, was_part = isinstance(after, Partial), isinstance(before, Partial)
            mine = [f"r{rank}"] * 16
            grid(picture, 262 + 62 * rank, y, first, mine, sign="+" if was_part else "")
            fills = ["sum"] * 16 if was_part else owner if not isinstance(before, Replicate) else mine
            kept = last if not is_part or rank == 0 else []
            grid(picture, 534 + 62 * rank, y, kept, fills, sign="+" if is_part else "")
    return picture


def partial_to_whole() -> Picture:
    """A product over a sharded dim, with its numbers."""
    picture = Picture(760, 300, "A product over a sharded dim gives partial sums, and an all-reduce the whole")
    x, w = torch.tensor([1, 2, 3, 4]), torch.tensor([10, 20, 30, 40])
    parts = (x * w).tolist()
    picture.text(20, 28, "x: S(1)", kind="accent mono")
    picture.text(20, 48, "w: S(0)", kind="accent mono")
    for rank in range(4):
        left = 130 + 152 * rank
        picture.text(left + 66, 22, f"rank {rank}", size=12, kind="soft", at="middle")
        picture.label(left, 32, 132, 44, [f"{x[rank]} · {w[rank]}"], f"r{rank}")
        picture.arrow((left + 66, 78), (left + 66, 106))
        picture.label(left, 110, 132, 44, [str(parts[rank])], "sum")
        if rank:
            picture.text(left - 10, 137, "+", size=16, kind="ink strong", at="middle")
        picture.arrow((left + 66, 156), (left + 66, 200))
        picture.label(left, 204, 132, 44, [str(sum(parts))], "good")
    picture.text(20, 137, "P(sum)", kind="accent mono")
    picture.text(20, 231, "R", kind="accent mono")
    picture.text(20, 98, "x @ w: no communication", size=12, kind="soft")
    picture.text(20, 184, "all-reduce", size=12, kind="soft")
    picture.text(
        20, 280, "A linear op takes the partial sum as it is. relu needs 300, not its parts.", size=12, kind="soft"
    )
    return picture
