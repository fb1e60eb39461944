"""The pages: links lead somewhere, every page is in the site, and every block of every page runs or says why not."""

import ast
import builtins
import json
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import pytest
import torch.distributed as dist
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.discovery.process import default_registry
from shardwise.testing import WorkerPool

LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
OWN_TEST = re.compile(r"^<!-- this page is run by (\S+) -->$", re.MULTILINE)
# Blocks that hold no program: what something printed, and settings, which are read.
READ = {"json": json.loads, "toml": tomllib.loads, "text": str, "yaml": str}


def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_page_is_in_the_navigation_of_the_site(page, docs):
    if docs.ROOT / "docs" in page.parents:
        assert f"- {page.relative_to(docs.ROOT / 'docs')}\n" in (docs.ROOT / "mkdocs.yml").read_text()


def test_every_block_runs_or_says_why_not(page, docs):
    for block in docs.blocks(page):
        runs = block.language in {"setup", "python", "console", *READ} or block.how.startswith(("in an", "file:"))
        assert runs or re.match(r"not run: \S+ \S+", block.how), f"{block} needs a language or a reason"


# Names that the text above a block says are the reader's own.
READERS_OWN = {"getting-started.md": {"model", "batch"}}


def test_python_blocks_show_where_their_names_come_from(page, docs):
    """A reader copies the blocks of a page one after another, and has no setup that the page does not show."""
    own = READERS_OWN.get(page.name, set()) | set(dir(builtins))
    shown = [b for b in docs.blocks(page) if b.language == "python"]
    on_ranks = [b.text for b in shown if b.how == "on 4 ranks"]
    in_one_process = [b.text for b in shown if not b.how or b.how.endswith(", run here too")]
    for program in on_ranks, in_one_process:
        assert not names_from_nowhere("".join(program)) - own


def names_from_nowhere(program):
    """The names that a program reads and neither binds nor imports anywhere."""
    read, bound = set(), set()
    for node in ast.walk(ast.parse(program)):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                read.add(name)
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ExceptHandler(name=str(name)):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case ast.alias():
                bound.add((node.asname or node.name).partition(".")[0])
    return read - bound


# What needs a process group, and what makes one. A reader's program has none when it starts; the pool of the tests has.
NEEDS_A_GROUP = {"get_rank", "get_world_size", "new_group", "barrier", "all_reduce", "broadcast_object_list"}
MAKES_A_GROUP = {"init_device_mesh", "init_process_group"}


def test_programs_make_a_process_group_before_they_use_one(page, docs):
    shown = "".join(b.text for b in docs.blocks(page) if b.language == "python" and b.how.endswith(RANKS))
    calls = sorted((node.lineno, called(node)) for node in ast.walk(ast.parse(shown)) if isinstance(node, ast.Call))
    made = min((line for line, name in calls if name in MAKES_A_GROUP), default=0)
    assert [name for line, name in calls if name in NEEDS_A_GROUP and line < made] == []


RANKS = ("on 4 ranks", "4 processes")


def called(node):
    """The last part of the name of what a call calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


@pytest.fixture(scope="module")
def page_ranks():
    """Four ranks for pages alone: each page makes meshes, and a process group that nobody uses burns time."""
    with WorkerPool(4, start_method="forkserver") as workers:
        yield workers


@pytest.fixture
def _leaves_no_plugin():
    """What a page calls a plugin's modules is gone afterwards."""
    yield
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("acme")]:
        del sys.modules[name]


@pytest.mark.usefixtures("_leaves_no_plugin")
def test_python_blocks_run(page, docs, page_ranks, monkeypatch, tmp_path):
    """Those for one process in one namespace, those for several ranks as one program on the pool."""
    own = OWN_TEST.search(page.read_text())
    if own:
        assert (docs.ROOT / own[1]).exists(), f"{page.name} says that {own[1]} runs it"
        return
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "page"}
    with kept_overrides():
        for block in docs.blocks(page):
            if block.language in {"setup", "python"} and (not block.how or block.how.endswith(", run here too")):
                exec(compile(block.text, str(block), "exec"), scope)  # noqa: S102  # the text under test
    programs = [b.text for b in docs.blocks(page) if b.how == "on 4 ranks"]
    if programs:
        printed = page_ranks.run(run_program, "".join(programs))[0]
        for block in docs.blocks(page):
            if block.how == "printed on 4 ranks":
                assert block.text in printed, str(block)


@contextmanager
def kept_overrides():
    """What a page overrides ends with it."""
    registry = default_registry()
    before = {op: list(entries) for op, entries in registry._overrides.items()}
    try:
        yield
    finally:
        registry._overrides = before
        registry.changed()


def run_program(text):
    """Run a program; what this rank printed."""
    with redirect_stdout(StringIO()) as out:
        exec(compile(text, "page", "exec"), {"__name__": "page"})  # noqa: S102  # the text under test
    return out.getvalue()


def test_console_blocks_print_what_they_show(page, docs, monkeypatch, tmp_path):
    if OWN_TEST.search(page.read_text()):
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWISE_LEARN", "auto")  # as a reader has it
    for block in docs.blocks(page):
        if block.how.startswith("file: ") and "/" not in block.how:
            (tmp_path / block.how.removeprefix("file: ").partition(",")[0]).write_text(block.text)
        if block.how.startswith("written: "):
            assert block.text == (tmp_path / block.how.removeprefix("written: ")).read_text(), str(block)
        if block.language != "console" or block.how not in ("", "output varies", "output in part"):
            continue
        for command, shown in docs.commands(block.text):
            words = shlex.split(command)
            if words[0] == "cat":
                (tmp_path / words[1]).write_text(shown)
                continue
            assert words[0] == "shardwise", f"{block}: {command} needs a mark of how it runs"
            result = CliRunner().invoke(main, words[1:])
            assert result.exception is None or isinstance(result.exception, SystemExit), (
                f"{block}: {result.exception!r}"
            )
            if block.how == "output in part":
                printed = iter(docs.squeezed(result.output))
                left_out = [line for line in docs.squeezed(shown) if line != "..." and line not in printed]
                assert not left_out, f"{block} shows what the command does not print, or not there"
            elif block.how != "output varies":
                assert docs.squeezed(shown) == docs.squeezed(result.output), str(block)


def readme_example(docs):
    (example,) = [b.text for b in docs.blocks(docs.ROOT / "README.md") if b.language == "python"]
    return example


def run_readme(text):
    """It ends with the process group, which the pool still needs."""
    kept, dist.destroy_process_group = dist.destroy_process_group, lambda: None
    try:
        return run_program(text)
    finally:
        dist.destroy_process_group = kept


def test_the_readme_example_runs(docs, page_ranks):
    printed, *others = page_ranks.run(run_readme, readme_example(docs))
    losses = list(map(float, printed.split()))
    assert len(losses) == 10
    assert losses == sorted(losses, reverse=True)
    assert others == [""] * 3


@pytest.mark.slow
@pytest.mark.sample
def test_the_readme_example_runs_under_torchrun(tmp_path, docs):
    printed = under_torchrun(tmp_path / "example.py", readme_example(docs))
    assert len(list(map(float, printed.split()))) == 10


def under_torchrun(script, text):
    """What a program prints that a reader saves and starts."""
    script.write_text(text)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_programs_of_the_cookbook_run_as_a_reader_saves_them(page, docs, tmp_path):
    """Without the setup that the page does not show, and without the process group of the pool."""
    blocks = [b for b in docs.blocks(page) if b.how in ("on 4 ranks", "printed on 4 ranks")]
    program = "".join(b.text for b in blocks if b.language == "python")
    if page.parent.name != "cookbook" or not program or OWN_TEST.search(page.read_text()):
        pytest.skip("no page of the cookbook whose program this test starts")
    printed = under_torchrun(tmp_path / "train.py", program)
    for block in blocks:
        if block.language == "text":
            assert block.text in printed, str(block)


@pytest.mark.slow
def test_the_site_builds(docs, tmp_path):
    pytest.importorskip("mkdocs", reason="needs the extra shardwise[docs]")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=docs.ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "first-rule" / "index.html").exists()
