"""Bytes and seconds as people read them."""

from __future__ import annotations

import re

__all__ = ["milliseconds", "parse_size", "size_text"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size_text(nbytes: int) -> str:
    """Bytes in the largest unit that leaves something before the point: ``1.71 GiB``."""
    size, unit = float(nbytes), 0
    while size >= 1024 and unit < len(_UNITS) - 1:  # noqa: PLR2004  # bytes
        size, unit = size / 1024, unit + 1
    return f"{size:,.2f} {_UNITS[unit]}" if unit else f"{nbytes:,} B"


def parse_size(text: str) -> int:
    """The bytes of ``64GiB``, ``1.5 GiB``, ``800MiB`` or ``4096``. Raises :class:`ValueError` for another text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i)?B?\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; sizes are like 64GiB, 1.5GiB, 800MiB or 4096")
    return int(float(match[1]) * 1024 ** (0 if match[2] is None else "KMGT".index(match[2][0]) + 1))


def milliseconds(seconds: float) -> str:
    """Seconds as milliseconds: ``788.1 ms``, ``0.042 ms``."""
    ms = seconds * 1e3
    return f"{ms:,.1f} ms" if ms >= 10 else f"{ms:.3f} ms"  # noqa: PLR2004  # three figures
