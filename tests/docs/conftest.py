"""The blocks of the documentation: what is in each fence, and what the comment before it says of how it runs.

==============================  ====================================================================================
``<!-- setup ... -->``          Python that runs before the blocks that follow it, and that readers do not see
``<!-- setup on 4 ranks ... ->`` the same in the program for several ranks
``<!-- on 4 ranks -->``         the next block is Python for so many ranks; those of a page are one program
``<!-- printed on 4 ranks -->`` the next block is what the first of the ranks prints
``<!-- output varies -->``      the next console block runs, and what it prints is not compared
``<!-- output in part -->``     it runs, and prints the lines that are shown, in this order; ``...`` stands for others
``<!-- written: NAME -->``      the next block is the file that a console block before it has written
``<!-- in an environment -->``  the next block runs in a fresh virtual environment with shardwise (a slow test)
``<!-- file: NAME -->``         the next block is that file, in the folder that console blocks run in; with
                                ``, run here too`` at its end it is also one of the page's Python blocks
``<!-- not run: why -->``       the next block does not run, for the reason given
==============================  ====================================================================================

A page whose examples need more than this says ``<!-- this page is run by TEST -->``; a ``$ cat FILE`` in a console
block is that file.
"""

import re
import sys
from pathlib import Path

import pytest
from attrs import frozen

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_SETUP = r"^<!-- setup(?: (?P<where>on 4 ranks))?\n(?P<setup>.*?)^-->$"
_FENCE = r"(?:^<!-- (?P<how>[^\n]*?) -->\n)?^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$"
_PART = re.compile(f"{_SETUP}|{_FENCE}", re.MULTILINE | re.DOTALL)


@frozen
class Block:
    """A fence of a page; ``how`` is the comment before it, ``language`` is ``setup`` for what readers do not see."""

    page: Path
    number: int
    language: str
    how: str
    text: str

    def __str__(self):
        return f"{self.page.name} block {self.number} ({self.language or 'no language'})"


def blocks(page):
    page_blocks = []
    for number, part in enumerate(_PART.finditer(page.read_text()), 1):
        if part["setup"] is not None:
            page_blocks.append(Block(page, number, "setup", part["where"] or "", part["setup"]))
        else:
            text = "".join(line.removeprefix(part["indent"]) for line in part["text"].splitlines(keepends=True))
            page_blocks.append(Block(page, number, part["language"], part["how"] or "", text))
    return page_blocks


def commands(text):
    """The commands of a console block, each with what it is shown to print."""
    parts = re.split(r"^\$ (.*(?:\\\n.*)*)\n", text, flags=re.MULTILINE)
    return zip((c.replace("\\\n", " ") for c in parts[1::2]), parts[2::2], strict=True)


def squeezed(text):
    """Lines without the space that the width of a terminal decides, the folder of a checkout and the line of a rule."""
    lines = (re.sub(r"[\s─━┃│┏┓┗┛┡┩├┤└┘┬┴┼╇╈╋═]+", " ", line).strip() for line in text.splitlines())
    lines = (re.sub(r"\S*/(?=(core|plugins)/shardwise)", "", line) for line in lines)
    lines = (re.sub(r"(\.py):\d+", r"\1", line) for line in lines)
    return [line for line in lines if line]


@pytest.fixture(scope="session")
def docs():
    """This module: the pages and their blocks."""
    return sys.modules[__name__]


def pytest_generate_tests(metafunc):
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
