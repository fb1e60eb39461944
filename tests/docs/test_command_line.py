"""The page on the command line: every command of it in an environment with three plugins, one of each fate."""

import re
import shlex
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.discovery import process

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
BROKEN = "raise OSError('libacme.so: cannot open shared object file: No such file or directory')"


@pytest.fixture
def folders(tmp_path, monkeypatch, installed):
    """What paths are called on the page; the working directory is the page's home folder."""
    site, home = tmp_path / "site", tmp_path / "home"
    home.mkdir()
    before = set(sys.modules)
    source = installed.source_of("mm", "m k, k n -> m n", "reduce={'k': 'sum'}, replaces='shardwise'")
    about = ("Summary: Kernels of Acme", "Home-page: https://acme.example/kernels")
    for wheel in (
        installed.make_wheel(tmp_path, "acme-broken", BROKEN, version="0.1"),
        installed.make_wheel(
            tmp_path, "acme-kernels", source, version="1.2", requires=("shardwise<0.2,>=0.1.0.dev0",), about=about
        ),
        installed.make_wheel(tmp_path, "acme-old", "", version="0.3", group="shardwise.plugins.v0"),
    ):
        zipfile.ZipFile(wheel).extractall(site)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(process._process, "registry", None)
    monkeypatch.setattr(process._process, "statuses", [])
    monkeypatch.chdir(home)
    yield {home: "/home/ada", site: "/site-packages", installed.ROOT / "plugins": "/site-packages"}
    for name in set(sys.modules) - before:
        if name.startswith("acme_") or str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def printed(command, folders):
    """What a command prints, with the page's folders and without what varies."""
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    assert result.exception is None or isinstance(result.exception, SystemExit), f"{command}: {result.exception!r}"
    text = result.output
    for folder, name in folders.items():
        text = text.replace(str(folder), name)
    return text


def timeless(lines):
    return [re.sub(r"\d+ ms\b", "N ms", line) for line in lines]


def holds(shown, lines):
    """Whether the lines are those shown, in which ``...`` stands for any number of them."""
    rest, parts = lines, [[]]
    for line in shown:
        if line == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    for i, part in enumerate(parts):
        starts = [0] if i == 0 else range(len(rest) - len(part) + 1)
        at = next((start for start in starts if rest[start : start + len(part)] == part), None)
        if at is None:
            return False
        rest = rest[at + len(part) :]
    return not rest or not parts[-1]


def test_the_commands_print_what_the_page_shows(docs, folders):
    done = 0
    for block in docs.blocks(PAGE):
        if block.language != "console" or block.how.startswith("not run"):
            continue
        for command, shown in docs.commands(block.text):
            if command.startswith("cat "):
                Path(command.removeprefix("cat ")).write_text(shown)
                continue
            printed_now = timeless(docs.squeezed(printed(command, folders)))
            if block.how != "output varies":
                assert holds(timeless(docs.squeezed(shown)), printed_now), "\n".join([command, *printed_now])
            done += 1
    assert done == 12


@pytest.mark.parametrize("shown", ["a b c", "a ... c", "a b ...", "a ...", "... c"])
def test_lines_may_be_left_out(shown):
    assert holds(shown.split(), ["a", "b", "c"])


@pytest.mark.parametrize("shown", ["a c", "a b", "b ...", "a ... d", "... b"])
def test_what_is_shown_must_be_there(shown):
    assert not holds(shown.split(), ["a", "b", "c"])
