"""Help that fits the terminal: click's own takes 50 columns at least."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from typing import Any

import click

__all__ = ["HelpContext", "fits_terminal"]

_LEAST_OF_CLICK = 50
_MARGIN = 2  # as click leaves it
_NO_BREAK = "\N{NON-BREAKING HYPHEN}"


class HelpText(click.HelpFormatter):
    """Click's formatter, on a narrow terminal too."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.width = min(self.width, max(shutil.get_terminal_size().columns - _MARGIN, 30))

    def write_text(self, text: str) -> None:
        """A paragraph."""
        super().write_text(_in_one(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """A list of names and texts. Where it is narrow, a long name has a line of its own, so that texts have room."""
        rows = [(name, _in_one(text)) for name, text in rows]
        super().write_dl(rows, col_max if self.width >= _LEAST_OF_CLICK else self.width // 3, col_spacing)

    def getvalue(self) -> str:
        """The help."""
        return super().getvalue().replace(_NO_BREAK, "-")


def _in_one(text: str) -> str:
    # Click wraps at hyphens, which would cut --nproc-per-node in two.
    return text.replace("-", _NO_BREAK)


class HelpContext(click.Context):
    """A context whose help fits the terminal."""

    formatter_class = HelpText


def fits_terminal(command: click.Command) -> click.Command:
    """The command, whose help and that of its own commands fits the terminal."""
    command.context_class = HelpContext
    for inner in getattr(command, "commands", {}).values():
        fits_terminal(inner)
    return command
