"""An SVG picture: boxes, words and arrows, in colours for a light and a dark page.

A picture brings its own background, so that it can be read whatever the page around it looks like: an image follows the
browser's ``prefers-color-scheme``, not a switch of the site. Fonts are the reader's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

# class: light, dark
FILLS = {
    "card": ("#ffffff", "#1f2129"),
    "box": ("#f1f3f8", "#2b2e39"),
    "empty": ("#ffffff", "#1f2129"),
    "good": ("#d6efd8", "#24492c"),
    "bad": ("#fbdcd8", "#5a2722"),
    "sum": ("#ffe9a8", "#5d4a12"),
    "r0": ("#a9cdf5", "#24548c"),
    "r1": ("#fdcf9b", "#7a4812"),
    "r2": ("#b5e0b3", "#2c6a33"),
    "r3": ("#dcc0ee", "#693f88"),
}
INKS = {"ink": ("#1c1e26", "#e8eaf0"), "soft": ("#596070", "#b9becb"), "accent": ("#3346a8", "#a5b4ff")}
EDGE = ("#8b91a1", "#767d8f")
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
# The widest of the usual fonts, in parts of the size: DejaVu, on average of English words.
LETTER = {"sans": 0.56, "mono": 0.61}


def _style() -> str:
    def scheme(i: int) -> str:
        fills = [f".{name}{{fill:{colours[i]}}}" for name, colours in FILLS.items()]
        inks = [f".{name}{{fill:{colours[i]}}}" for name, colours in INKS.items()]
        lines = [f".edge{{stroke:{EDGE[i]}}}.line{{stroke:{INKS['soft'][i]}}}.bold{{stroke:{INKS['accent'][i]}}}"]
        return "".join(fills + inks + lines)

    return (
        f"text{{font-family:{SANS}}}.mono{{font-family:{MONO}}}.strong{{font-weight:600}}"
        ".line,.bold{fill:none;stroke-width:1.6}.bold{stroke-width:2.2}.edge{stroke-width:1}.dash{stroke-dasharray:4 3}"
        f"{scheme(0)}@media (prefers-color-scheme:dark){{{scheme(1)}}}"
    )


class Picture:
    """A picture of a size, with a title for who cannot see it. Whatever is drawn must lie inside."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width = width
        self.height = height
        self.title = title
        self._parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, fill: str = "box", *, round_: float = 6) -> None:
        """A rectangle."""
        self._inside(x, y)
        self._inside(x + width, y + height)
        corner = f' rx="{round_:g}"' if round_ else ""
        self._parts.append(
            f'<rect class="{fill} edge" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{corner}/>'
        )

    def text(
        self, x: float, y: float, words: str, *, size: float = 13, kind: str = "ink", at: str = "start", room: float = 0
    ) -> None:
        """One line of words; ``y`` is its base line. ``room`` is the width that it may take (0: up to the border)."""
        width = text_width(words, size, kind)
        left = x - {"start": 0, "middle": width / 2, "end": width}[at]
        if room and width > room:
            raise ValueError(f"{words!r} is {width:.0f} wide and has {room:.0f}")
        self._inside(left, y - size)
        self._inside(left + width, y)
        anchor = "" if at == "start" else f' text-anchor="{at}"'
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size:g}"{anchor}>{escape(words)}</text>'
        )

    def lines(self, x: float, y: float, lines: Sequence[str], *, step: float = 18, **how: object) -> None:
        """Several lines, one below the other."""
        for i, words in enumerate(lines):
            self.text(x, y + i * step, words, **how)  # type: ignore[arg-type]

    def label(self, x: float, y: float, width: float, height: float, lines: Sequence[str], fill: str = "box") -> None:
        """A box with lines in its middle; the first is strong, the others small."""
        self.box(x, y, width, height, fill)
        first = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
        for i, words in enumerate(lines):
            size, kind = (13, "ink strong") if i == 0 else (11.5, "soft")
            self.text(x + width / 2, first + 16 * i, words, size=size, kind=kind, at="middle", room=width - 6)

    def arrow(self, *points: tuple[float, float], kind: str = "line") -> None:
        """A line through points, with a head at its end."""
        for x, y in points:
            self._inside(x, y)
        way = " ".join(f"{'L' if i else 'M'}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        (x0, y0), (x, y) = points[-2:]
        length = max(((x - x0) ** 2 + (y - y0) ** 2) ** 0.5, 1e-9)
        u, v = 6 * (x - x0) / length, 6 * (y - y0) / length
        head = f"M{x - u - v * 0.7:.1f} {y - v + u * 0.7:.1f} L{x:g} {y:g} L{x - u + v * 0.7:.1f} {y - v - u * 0.7:.1f}"
        self._parts.append(f'<path class="{kind}" d="{way} {head}"/>')

    def line(self, x0: float, y0: float, x1: float, y1: float, kind: str = "line") -> None:
        """A straight line."""
        self._inside(x0, y0)
        self._inside(x1, y1)
        self._parts.append(f'<path class="{kind}" d="M{x0:g} {y0:g} L{x1:g} {y1:g}"/>')

    def svg(self) -> str:
        """The file."""
        w, h = self.width, self.height
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{_style()}</style>",
                f'<rect class="card" width="{w}" height="{h}" rx="8"/>',
                *self._parts,
                "</svg>\n",
            ]
        )

    def _inside(self, x: float, y: float) -> None:
        if not (0 <= x <= self.width and 0 <= y <= self.height):
            raise ValueError(f"({x:.0f}, {y:.0f}) lies outside of {self.title!r}")


def text_width(words: str, size: float, kind: str = "ink") -> float:
    """An upper estimate of the width of words."""
    return len(words) * size * LETTER["mono" if "mono" in kind else "sans"]
