"""How a tensor lies on a mesh, as blocks in a terminal and as SVG in a notebook. Nothing is computed or sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import accumulate
from typing import Any

import torch
from attrs import frozen
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import CallError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import Placement, parse_placement
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tools.layout_blocks import Cell, Interval, LayoutBlocks, blocks_of, ranks_text

__all__ = ["Picture", "visualize"]

_MOST = 24  # blocks along a dim that are drawn, and pictures of further dims
_MOST_RANKS = 1 << 20  # each is looked at
_WIDTH = 64  # of a picture in characters, where the blocks leave room
_ROW, _HEIGHT = 3, 12  # of a row of blocks, and of a picture
_COLOURS = ("blue", "green", "magenta", "cyan", "yellow", "red", "bright_blue", "bright_green")
# The same in SVG: light, so that black text can be read on them.
_FILLS = ("#9ecbff", "#b4e3a8", "#e3b7f0", "#a6e7e9", "#f6e29c", "#f7b5ad", "#c9d6ff", "#d8f0c0")
_FONT = 'font-family="ui-monospace, monospace" font-size="12"'
_HATCHING = (
    '<defs><pattern id="partial" width="8" height="8" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<rect width="3" height="8" fill="#000" opacity="0.18"/></pattern></defs>'
)
_SIGNS = {"sum": " + ", "product": " * "}


def visualize(
    tensor: MeshTensor | TensorSpec | Sequence[int],
    mesh_shape: Sequence[int] | None = None,
    placements: Sequence[Placement | str] | None = None,
    *,
    names: Sequence[str] | None = None,
    dims: Sequence[int] | None = None,
) -> Picture:
    """How a tensor lies: a :class:`Picture` of the blocks that its mesh cuts it into, with the ranks that hold each.

    ``tensor`` is a MeshTensor or a spec; or it is a shape, with a mesh's shape and placements (``Shard(0)``, or as text
    ``"S(0)"``), for which no mesh is needed. ``names`` are those of the mesh dims. Two dims are drawn: ``dims``, or the
    two with most shards; a dim that is sharded besides has a picture for each shard. No op runs, and nothing is sent,
    so one rank alone may call it. Raises :class:`CallError` for anything else, and :class:`PlacementError` for
    placements that the tensor cannot have.
    """
    if isinstance(tensor, MeshTensor):
        spec = tensor.spec
    elif isinstance(tensor, TensorSpec):
        spec = tensor
    else:
        spec = _described(tensor, mesh_shape, placements, names)
    if dims is not None and not (
        isinstance(dims, (tuple, list))
        and all(isinstance(d, int) for d in dims)
        and 1 <= len({d % spec.ndim for d in dims if spec.ndim}) == len(dims) <= 2  # noqa: PLR2004  # a picture's
        and all(-spec.ndim <= d < spec.ndim for d in dims)
    ):
        raise CallError(
            asked=f"draw the dims {dims!r} of {spec}",
            found=f"a picture has one or two dims, and the tensor has {spec.ndim}",
            do=f"Name one or two dims from {-spec.ndim} to {spec.ndim - 1}.",
        )
    return Picture(blocks_of(spec, dims))


def _described(shape: Any, mesh_shape: Any, placements: Sequence[Placement | str] | None, names: Any) -> TensorSpec:
    is_shape = isinstance(shape, (tuple, list, torch.Size)) and all(isinstance(n, int) and n >= 0 for n in shape)
    if not is_shape or mesh_shape is None or placements is None:
        raise CallError(
            asked=f"show how a {type(shape).__name__} lies on a mesh",
            found="it is not a MeshTensor, and not a shape with a mesh's shape and placements",
            do="Write visualize(x) or visualize((8, 6), (2, 2), [Shard(0), Replicate()]).",
        )
    if isinstance(mesh_shape, DeviceMesh):
        mesh_shape, names = tuple(mesh_shape.shape), names or mesh_shape.mesh_dim_names
    is_mesh = isinstance(mesh_shape, (tuple, list)) and all(isinstance(n, int) and n > 0 for n in mesh_shape)
    if not is_mesh or (names is not None and (isinstance(names, str) or len(names) != len(mesh_shape))):
        raise CallError(
            asked=f"show a tensor on a mesh {mesh_shape!r}" + ("" if names is None else f" with the names {names!r}"),
            found="a mesh has a whole number above 0 for each of its dims, and a name for each or for not one",
            do='Write visualize((8, 6), (2, 2), ["S(0)", "R"], names=["dp", "tp"]).',
        )
    if math.prod(mesh_shape) > _MOST_RANKS:
        raise CallError(
            asked=f"show a tensor on a mesh {mesh_shape!r}",
            found=f"it has {math.prod(mesh_shape):,} ranks, and at most {_MOST_RANKS:,} are drawn",
            do="Take a smaller mesh.",
        )
    given = [placements] if isinstance(placements, (str, Placement)) else placements
    listed = [parse_placement(p) if isinstance(p, str) else p for p in given]
    mesh = AbstractMesh(mesh_shape, mesh_dim_names=None if names is None else tuple(names))
    return TensorSpec(mesh, tuple(listed), TensorMeta.contiguous(tuple(shape), torch.float32))


@frozen(repr=False)
class Picture:
    """What :func:`visualize` returns: prints as blocks, coloured on a rich console, and shows as SVG in notebooks."""

    blocks: LayoutBlocks

    # -- as text --
    def __str__(self) -> str:
        return "\n".join(line.plain.rstrip() for line in self._lines())

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._lines()

    def _lines(self) -> list[Text]:
        lines = [Text(self.title, style="bold")]
        for panel in list(self.blocks.panels())[:_MOST]:
            lines += self._panel(panel)
        return lines + [Text(note, style="dim") for note in self.notes]

    @property
    def title(self) -> str:
        """The tensor, its placements and its mesh, on one line."""
        spec = self.blocks.spec
        names = spec.mesh.mesh_dim_names or [f"dim{m}" for m in range(len(spec.mesh_shape))]
        mesh = ", ".join(f"{name} {size}" for name, size in zip(names, spec.mesh_shape, strict=True))
        return f"{spec} on {mesh or 'a mesh without dims'}"

    @property
    def notes(self) -> list[str]:
        """What the blocks do not show by themselves."""
        blocks, spec = self.blocks, self.blocks.spec
        notes = []
        if not blocks.cells or not any(cell.holders for cell in blocks.cells.values()):
            notes.append("the tensor has no elements")
        if blocks.whole:
            what = "dim" if len(blocks.whole) == 1 else "dims"
            notes.append(f"{what} {', '.join(map(str, blocks.whole))}: whole in every block")
        if kinds := list(dict.fromkeys(spec.reductions.values())):
            sign = _SIGNS.get(kinds[0], "; ").strip() if len(kinds) == 1 else ";"
            notes.append(f"partial {' and '.join(kinds)}: ranks on both sides of {sign} hold parts of each value")
        if any(len(group) > 1 for cell in blocks.cells.values() for group in cell.holders):
            notes.append("ranks with a comma or a dash between them hold copies")
        if blocks.empty and len(blocks.empty) < spec.mesh.size():
            what = "rank" if len(blocks.empty) == 1 else "ranks"
            notes.append(f"{what} {ranks_text(blocks.empty)}: an empty part")
        cut = [d for d in blocks.drawn if len(blocks.cuts[d]) > _MOST]
        notes += [f"dim {d}: the first {_MOST} of {len(blocks.cuts[d])} blocks" for d in cut]
        return notes

    def _panel(self, panel: tuple[Interval, ...]) -> list[Text]:
        blocks = self.blocks
        rows, columns = self._shown(blocks.rows), self._shown(blocks.columns)
        if not rows or not columns:
            return []
        head = [f"dim {d}: {_interval_text(i)}" for d, i in zip(blocks.others, panel, strict=True)]
        cells = [[blocks.cell(panel, row, column) for column in columns] for row in rows]
        texts = [[self.holders_text(cell) for cell in row] for row in cells]
        labels = [_interval_text(row) for row in rows]
        heads = [_interval_text(column) for column in columns]
        widths = _sizes(
            columns, _WIDTH, [max(map(len, (heads[i], *(row[i] for row in texts)))) + 2 for i in range(len(columns))]
        )
        heights = _sizes(rows, min(_HEIGHT, _ROW * len(rows)), [1] * len(rows))
        margin = max([len(label) for label in labels] + [len(f"dim {blocks.rows}") if blocks.rows is not None else 0])
        lines = [Text(", ".join(head), style="bold")] if head else []
        if blocks.columns is not None:
            across = " ".join(text.center(width) for text, width in zip(heads, widths, strict=True))
            corner = "" if blocks.rows is None else f"dim {blocks.rows}"
            lines.append(Text(f"{corner:>{margin}}  {across.rstrip()}  dim {blocks.columns}"))
        lines.append(_rule(margin, widths, "┌┬┐"))
        for k, (row, of_row, label, height) in enumerate(zip(cells, texts, labels, heights, strict=True)):
            if k:
                lines.append(_rule(margin, widths, "├┼┤"))
            for i in range(height):
                is_middle = i == (height - 1) // 2
                line = Text(f"{label if is_middle else '':>{margin}} │")
                for cell, text, width in zip(row, of_row, widths, strict=True):
                    style = f"black on {_COLOURS[self._colour(cell) % len(_COLOURS)]}" if cell.holders else ""
                    fill = "/" if len(cell.holders) > 1 else " "
                    line.append(f" {text} ".center(width, fill) if is_middle else fill * width, style)
                    line.append("│")
                lines.append(line)
        lines.append(_rule(margin, widths, "└┴┘"))
        return lines

    def _shown(self, dim: int | None) -> list[Interval | None]:
        return [None] if dim is None else list(self.blocks.cuts[dim][:_MOST])

    def _colour(self, cell: Cell) -> int:
        """The same for blocks that the same ranks hold: the number of their set among all sets."""
        sets = list(dict.fromkeys(one.ranks for one in self.blocks.cells.values()))
        return sets.index(cell.ranks)

    def holders_text(self, cell: Cell) -> str:
        """``0,1`` for copies, ``0 + 1`` for parts of a sum, ``max(0; 1)`` for those of another reduction."""
        groups = [ranks_text(group) for group in cell.holders]
        kinds = list(dict.fromkeys(self.blocks.spec.reductions.values()))
        if len(groups) == 1 and not kinds:
            return groups[0]
        if len(kinds) == 1 and kinds[0] in _SIGNS:
            return _SIGNS[kinds[0]].join(groups)
        return f"{' of '.join(kinds)}({'; '.join(groups)})" if groups else ""

    # -- as SVG --
    def _repr_html_(self) -> str:
        return f"<div>{self.svg()}</div>"

    def svg(self) -> str:
        """The picture as an SVG image. Blocks with partial values are hatched."""
        blocks = self.blocks
        parts: list[str] = []
        top, width = 34.0, 0.0
        for panel in list(blocks.panels())[:_MOST]:
            drawing, panel_width, panel_height = self._svg_panel(panel, top)
            parts += drawing
            top, width = top + panel_height + 12, max(width, panel_width)
        width = max(width, 8.0 * max(map(len, [self.title, *self.notes])) + 16)
        notes = [_svg_text(8, top + 16 * (i + 1), note, "start", "#555") for i, note in enumerate(self.notes)]
        height = top + 16 * (len(notes) + 1)
        return "".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" {_FONT}>',
                _HATCHING,
                f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>',
                _svg_text(8, 18, self.title, "start", "#000"),
                *parts,
                *notes,
                "</svg>",
            ]
        )

    def _svg_panel(self, panel: tuple[Interval, ...], top: float) -> tuple[list[str], float, float]:
        blocks = self.blocks
        rows, columns = self._shown(blocks.rows), self._shown(blocks.columns)
        if not rows or not columns:
            return [], 0.0, 0.0
        head = ", ".join(f"dim {d}: {_interval_text(i)}" for d, i in zip(blocks.others, panel, strict=True))
        cells = [[blocks.cell(panel, row, column) for column in columns] for row in rows]
        longest = [max(len(self.holders_text(row[i])) for row in cells) for i in range(len(columns))]
        heads = [_interval_text(column) for column in columns]
        widths = _sizes(columns, 480, [8 * max(n, len(text)) + 12 for n, text in zip(longest, heads, strict=True)])
        heights = _sizes(rows, 200, [26] * len(rows))
        left = 8.0 * max(len(_interval_text(row)) for row in rows) + 20
        out = [_svg_text(8, top + 12, head, "start", "#000")] if head else []
        y0 = top + (18 if head else 0) + 18
        xs, ys = [0, *accumulate(widths)], [0, *accumulate(heights)]
        for i, text in enumerate(heads):
            out.append(_svg_text(left + (xs[i] + xs[i + 1]) / 2, y0 - 6, text, "middle", "#555"))
        for k, row in enumerate(cells):
            out.append(_svg_text(left - 8, y0 + (ys[k] + ys[k + 1]) / 2 + 4, _interval_text(rows[k]), "end", "#555"))
            for i, cell in enumerate(row):
                box = f'x="{left + xs[i]:g}" y="{y0 + ys[k]:g}" width="{widths[i]:g}" height="{heights[k]:g}"'
                fill = _FILLS[self._colour(cell) % len(_FILLS)]
                out.append(f'<rect {box} fill="{fill}" stroke="#333"/>')
                if len(cell.holders) > 1:
                    out.append(f'<rect {box} fill="url(#partial)"/>')
                middle = left + (xs[i] + xs[i + 1]) / 2, y0 + (ys[k] + ys[k + 1]) / 2 + 4
                out.append(_svg_text(*middle, self.holders_text(cell), "middle", "#000"))
        return out, left + sum(widths) + 8, y0 - top + sum(heights)


def _interval_text(interval: Interval | None) -> str:
    """``0:4``, as in a slice."""
    return "" if interval is None else f"{interval[0]}:{interval[1]}"


def _sizes(intervals: Sequence[Interval | None], room: int, least: Sequence[int]) -> list[int]:
    """Sizes on the page that are in proportion to the intervals, as far as the least sizes leave room."""
    lengths = [1 if interval is None else interval[1] - interval[0] for interval in intervals]
    total = sum(lengths)
    return [max(low, round(room * length / total)) for length, low in zip(lengths, least, strict=True)]


def _rule(margin: int, widths: Sequence[int], corners: str) -> Text:
    left, between, right = tuple(corners)
    return Text(f"{'':>{margin}} {left}{between.join('─' * width for width in widths)}{right}")


def _svg_text(x: float, y: float, text: str, anchor: str, colour: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'
