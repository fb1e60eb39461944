"""A picture of a timeline: a lane for the program and for each mesh dim, and what the program waits for in red."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

__all__ = ["svg_of"]

_WIDTH, _LEFT, _LANE, _TOP = 1000, 84, 26, 34
_FONT = 'font-family="sans-serif" font-size="11"'
_COLOURS = {"module": "#c9d6ea", "backward": "#d9cdea", "optimizer": "#cfe6cf", "wait": "#d9534f"}
_IMPLICIT, _EXPLICIT = "#f0a33c", "#5b9bd5"
_LEGEND = (
    ("forward", "#c9d6ea"),
    ("backward", "#d9cdea"),
    ("optimizer", "#cfe6cf"),
    ("the program waits", "#d9534f"),
    ("implicit", _IMPLICIT),
    ("explicit", _EXPLICIT),
)


def svg_of(events: Sequence[Mapping[str, Any]], tracks: Mapping[int, str]) -> str:
    """The slices of a trace on their tracks, as SVG; each has its name as a tooltip.

    ``events`` are complete events of the trace format. Modules are drawn by their depth, the outermost first.
    """
    end = max((event["ts"] + event["dur"] for event in events), default=1.0)
    begin = min((event["ts"] for event in events), default=0.0)
    rows = {track: _TOP + i * (_LANE + 6) for i, track in enumerate(sorted(tracks))}
    height = _TOP + len(rows) * (_LANE + 6) + 22
    scale = (_WIDTH - _LEFT - 8) / max(end - begin, 1e-9)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" {_FONT}>',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        *_legend(),
    ]
    for track, y in rows.items():
        lines.append(f'<text x="6" y="{y + 17}">{escape(tracks[track])}</text>')
        lines.append(f'<rect x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - 8}" height="{_LANE}" fill="#f5f5f5"/>')
    for event in events:
        x, width = _LEFT + (event["ts"] - begin) * scale, max(event["dur"] * scale, 0.4)
        y, high, colour = _shape(event, rows[event["tid"]])
        shape = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{high}" fill="{colour}"'
        lines.append(f"<rect {shape}><title>{escape(str(event['name']))}</title></rect>")
    lines.append(f'<text x="{_LEFT}" y="{height - 6}">0 ms</text>')
    last = f"{(end - begin) / 1e3:,.1f} ms"
    lines.append(f'<text x="{_WIDTH - 8}" y="{height - 6}" text-anchor="end">{last}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _shape(event: Mapping[str, Any], y: int) -> tuple[int, int, str]:
    """Top, height and colour of a slice in its lane."""
    category = str(event["cat"])
    if category == "collective":
        return y + 3, _LANE - 6, _IMPLICIT if event["args"]["implicit"] else _EXPLICIT
    return (y + 13, _LANE - 13, _COLOURS["wait"]) if category == "wait" else (y, 12, _COLOURS.get(category, "#dddddd"))


def _legend() -> Iterator[str]:
    x = _LEFT
    for text, colour in _LEGEND:
        yield f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="20">{text}</text>'
        x += 40 + 7 * len(text)
