"""Words of a lockfile: texts without what separates columns, and the modules of repeated layers as one pattern."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from itertools import product

__all__ = ["collapsed", "escaped", "expanded", "module_order", "unescaped"]

_NUMBER = re.compile(r"0|[1-9]\d{0,8}", re.ASCII)
_RANGES = re.compile(r"\{(\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\}", re.ASCII)
_CODE = re.compile(r"\\(?:([\\-])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8}))")
_SURROGATES = re.compile("[\ud800-\udfff]")
MOST_LAYERS = 100_000
"""No pattern stands for more modules: a line of a file may not ask for any amount of memory."""


def escaped(text: str, also: str = "") -> str:
    """A text as one word of a line: without line ends, without two blanks in a row, and not empty (that is ``-``).

    ``also`` has characters that mean something to whoever reads the word.
    """
    if text in ("", "-"):
        return "-" if not text else r"\-"
    text = _SURROGATES.sub("\ufffd", text)  # halves of characters, which no file holds
    out = []
    for i, char in enumerate(text):
        is_gap = char == " " and (i in (0, len(text) - 1) or text[i - 1] == " ")
        if char == "\\":
            out.append(r"\\")
        elif char in also or is_gap or not char.isprintable():
            code = ord(char)
            out.append(f"\\x{code:02x}" if code <= 0xFF else f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}")  # noqa: PLR2004  # of one byte, of two
        else:
            out.append(char)
    return "".join(out)


def unescaped(word: str) -> str:
    """The text of :func:`escaped`. Raises :class:`ValueError` for a word that it does not write."""
    if word == "-":
        return ""
    if "\\" not in word:
        return word
    parts, at = [], 0
    while (start := word.find("\\", at)) >= 0:
        match = _CODE.match(word, start)
        if match is None:
            raise ValueError(f"{word[start : start + 2]!r} does not stand for a character")
        code = 0 if match[1] else int(match[2] or match[3] or match[4], 16)
        char = match[1] or (chr(code) if code <= sys.maxunicode else "\ud800")
        if _SURROGATES.match(char):
            raise ValueError(f"{match[0]!r} does not stand for a character")
        parts += [word[at:start], char]
        at = match.end()
    return "".join([*parts, word[at:]])


# -- modules ---------------------------------------------------------------------------------------------------------

# A path in parts: a name, or the ascending numbers that stand there.
_Part = str | tuple[int, ...]
_Path = tuple[_Part, ...]


def module_order(path: str) -> tuple[tuple[bool, int, str], ...]:
    """A key to sort module paths: their numbers in the order of numbers."""
    return tuple((True, int(p), p) if _NUMBER.fullmatch(p) else (False, 0, p) for p in path.split("."))


def collapsed(paths: Iterable[str]) -> list[str]:
    """Patterns of module paths: ``blocks.{0-11}.wq`` for twelve of them. :func:`expanded` gives the paths back.

    Which patterns there are depends on the set of the paths alone.
    """
    parts: set[_Path] = {tuple(path.split(".")) for path in paths}
    longest = max(map(len, parts), default=0)
    for place in reversed(range(longest)):
        groups: dict[tuple[_Path, _Path], list[int]] = {}
        rest: set[_Path] = set()
        for path in parts:
            part = path[place] if place < len(path) else ""
            if isinstance(part, str) and _NUMBER.fullmatch(part):
                groups.setdefault((path[:place], path[place + 1 :]), []).append(int(part))
            else:
                rest.add(path)
        parts = rest | {
            (*before, tuple(sorted(numbers)) if len(numbers) > 1 else str(numbers[0]), *after)
            for (before, after), numbers in groups.items()
        }
    return [".".join(map(_part_text, path)) for path in sorted(parts, key=_order)]


def _order(path: _Path) -> list[tuple[bool, int, str]]:
    return [module_order(p)[0] if isinstance(p, str) else (True, p[0], _part_text(p)) for p in path]


def _part_text(part: _Part) -> str:
    if isinstance(part, str):
        return escaped(part, "{}") if part else ""
    runs: list[list[int]] = []
    for number in part:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return "{" + ",".join("-".join(map(str, run)) for run in runs) + "}"


def expanded(pattern: str) -> list[str]:
    """The module paths that a pattern stands for. Raises :class:`ValueError` for what is not one."""
    choices: list[Sequence[str]] = []
    for part in pattern.split("."):
        match = _RANGES.fullmatch(part)
        choices.append([str(n) for n in _numbers(match[1])] if match else [unescaped(part) if part else ""])
        if not match and ("{" in part or "}" in part):
            raise ValueError(f"{part!r} is not a list of numbers as {{0-11}}")
    count = 1
    for choice in choices:
        count *= len(choice)
    if count > MOST_LAYERS:
        raise ValueError(f"{pattern!r} stands for {count:,} modules; at most {MOST_LAYERS:,} are read")
    return [".".join(path) for path in product(*choices)]


def _numbers(text: str) -> list[int]:
    numbers: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        start, end = int(first), int(last or first)
        if end < start or (numbers and start <= numbers[-1]):
            raise ValueError(f"{{{text}}} is not ascending")
        if end - start >= MOST_LAYERS:
            raise ValueError(f"{{{text}}} stands for more than {MOST_LAYERS:,} modules")
        numbers += range(start, end + 1)
    return numbers
