"""Pictures of what happens in an order: rings, edges, overlap, and a plan of a whole step."""

from __future__ import annotations

import re
from pathlib import Path

from svg_canvas import Picture

PLAN_PAGE = Path(__file__).parents[2] / "docs" / "plan.md"


def ring_attention() -> Picture:
    """Which block of keys and values each rank has at each step."""
    picture = Picture(760, 330, "Ring attention: queries stay, blocks of keys and values go round four ranks")
    for rank in range(4):
        x = 130 + 156 * rank
        picture.text(x + 66, 26, f"rank {rank}", size=12, kind="soft", at="middle")
        picture.label(x, 36, 132, 34, [f"queries {rank}"], f"r{rank}")
    for step in range(4):
        y = 88 + 54 * step
        picture.text(20, y + 24, f"step {step + 1}", size=13, kind="ink strong")
        for rank in range(4):
            x, block = 130 + 156 * rank, (rank - step) % 4
            picture.label(x, y, 132, 36, [f"keys, values {block}"], f"r{block}")
            if step < 3 and rank < 3:
                picture.arrow((x + 126, y + 38), (x + 168, y + 52), kind="bold")
    picture.text(
        20,
        318,
        "While a rank computes with the block that it has, the next is on its way. The last rank sends to rank 0.",
        size=12,
        kind="soft",
    )
    return picture


def halo_exchange() -> Picture:
    """A convolution of width 3 along a sharded dim needs one position of each neighbour."""
    picture = Picture(760, 250, "Halo exchange: each rank fetches the edges that its outputs reach")
    side = 38
    picture.text(20, 46, "positions", size=13, kind="ink strong")
    for e in range(16):
        picture.box(120 + side * e, 24, side, 34, f"r{e // 4}", round_=0)
        picture.text(120 + side * e + side / 2, 46, str(e), size=12, at="middle")
    picture.text(20, 150, "local input", size=13, kind="ink strong")
    for rank in range(4):
        has = [e for e in range(4 * rank - 1, 4 * rank + 5) if 0 <= e < 16]
        left = 120 + 160 * rank - (0 if rank == 0 else 12)
        width = 24
        for i, e in enumerate(has):
            edge = e // 4 != rank
            picture.box(left + width * i, 128, width, 34, f"r{e // 4}", round_=0)
            picture.text(
                left + width * i + width / 2, 150, str(e), size=11, at="middle", kind="ink strong" if edge else "ink"
            )
            if edge:
                picture.arrow((120 + side * e + side / 2, 60), (left + width * i + width / 2, 126), kind="bold")
        picture.text(left + width * len(has) / 2, 182, f"rank {rank}", size=12, kind="soft", at="middle")
    picture.text(
        20,
        214,
        "A window of 3 reaches one position further on each side. Only these edges are sent; the gradients",
        size=12,
        kind="soft",
    )
    picture.text(20, 232, "of the edges go back the same way.", size=12, kind="soft")
    return picture


def overlap() -> Picture:
    """Two lanes of time, without and with prefetch; units of equal length, not measured."""
    picture = Picture(760, 284, "Communication beside computation: gathering the next unit while this one computes")
    unit = 68

    def lanes(y: float, name: str, gathers: list[float], computes: list[float]) -> None:
        picture.text(20, y - 8, name, size=13, kind="ink strong")
        for lane, starts, word in ((0, gathers, "gather"), (1, computes, "compute")):
            picture.text(20, y + 21 + 38 * lane, ("network", "device")[lane], size=12, kind="soft")
            for i, start in enumerate(starts):
                picture.box(92 + unit * start, y + 38 * lane, unit - 2, 32, f"r{i}", round_=3)
                picture.text(
                    92 + unit * start + unit / 2, y + 20 + 38 * lane, f"{word} {i + 1}", size=11, at="middle", room=unit
                )

    lanes(38, "each op waits for its parameters", [0, 2, 4, 6], [1, 3, 5, 7])
    lanes(158, 'sw.prefetch(model, "dp")', [0, 1, 2, 3], [1, 2, 3, 4])
    picture.line(92 + unit * 8, 26, 92 + unit * 8, 116, kind="line dash")
    picture.line(92 + unit * 5, 146, 92 + unit * 5, 236, kind="line dash")
    picture.arrow((92 + unit * 8 - 2, 176), (92 + unit * 5 + 6, 176))
    picture.text(92 + unit * 6.5, 200, "time won", size=12, kind="soft", at="middle")
    picture.text(
        20, 264, "Drawn with units of equal length. The page on performance has measured figures.", size=12, kind="soft"
    )
    return picture


def _plan_figures() -> tuple[tuple[float, float], list[tuple[str, str, str]]]:
    """What the page's first table says: milliseconds, and the collectives of both."""
    table = PLAN_PAGE.read_text().split("```console")[1].split("```")[0]
    cost = re.search(r"by the cost model │\s+([\d.]+) ms │\s+([\d.]+) ms", table)
    assert cost is not None
    found = re.findall(r"│ (?:forward|backward) (\w+) over tp\s+│\s+(.+?) │\s+(.+?) │", table)
    phases = re.findall(r"│ (forward|backward) \w+ over tp", table)
    named = [(f"{phase} {name.replace('_', '-')}", a, b) for phase, (name, a, b) in zip(phases, found, strict=True)]
    return (float(cost[1]), float(cost[2])), named


def plan() -> Picture:
    """The figures of docs/plan.md's first example, as bars and as lists."""
    (before, after), collectives = _plan_figures()
    picture = Picture(
        760, 168 + 32 * len(collectives), "A step op by op and by a plan: what it costs and what it sends"
    )
    picture.text(20, 30, "forward and backward, by the cost model", size=13, kind="ink strong")
    for i, (name, ms) in enumerate((("op by op", before), ("plan", after))):
        y = 42 + 34 * i
        picture.text(20, y + 19, name, size=12.5, kind="soft")
        picture.box(110, y, 520 * ms / before, 27, "bad" if i == 0 else "good", round_=3)
        picture.text(118 + 520 * ms / before, y + 19, f"{ms:.3f} ms", size=12.5, kind="ink strong")
    y = 136
    picture.text(20, y, "collectives of one rank", size=13, kind="ink strong")
    picture.text(330, y, "op by op", size=12.5, kind="soft")
    picture.text(540, y, "plan", size=12.5, kind="soft")
    for i, (name, a, b) in enumerate(collectives):
        top = y + 12 + 32 * i
        picture.text(20, top + 18, name, size=12.5)
        for x, words, fill in ((330, a, "bad"), (540, b, "good")):
            if words.strip() != "-":
                picture.box(x, top, 180, 26, fill)
                picture.text(x + 10, top + 18, words.strip(), size=12)
            else:
                picture.text(x + 10, top + 18, "none", size=12, kind="soft")
    return picture
