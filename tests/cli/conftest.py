"""Distributions that are on the path for one test, in this process, whose registry is made anew."""

import importlib
import sys
import textwrap

import pytest

from shardwise.discovery import process

RULE = """
    import torch
    from shardwise.hookspecs import hookimpl
    from shardwise.rule import rule

    @hookimpl
    def shardwise_register(registry):
        registry.add(rule(torch.ops.aten.{op}.default, "{notation}"{more}))
"""


@pytest.fixture
def source():
    """``source(op, notation, more)``: a module whose hook registers one rule; the default op has no other rule."""
    unruled = "_copy_from_and_resize"
    return lambda op=unruled, notation="R, R -> R", more="": RULE.format(op=op, notation=notation, more=more)


@pytest.fixture
def install(tmp_path, monkeypatch, fresh):
    """``install(name, source, ...)``: one module and its metadata, as an installer leaves them."""
    before = set(sys.modules)

    def put(name, text, *, group="shardwise.plugins.v1", version="1.0", metadata="", folder="site", entry=None):
        site = tmp_path / folder
        module = name.replace("-", "_") + "_plugin"
        about = site / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir(parents=True)
        (site / f"{module}.py").write_text(textwrap.dedent(text))
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
        (about / "entry_points.txt").write_text(f"[{group}]\n{entry or name} = {module}\n")
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(str(site))
        importlib.invalidate_caches()
        fresh()
        return site

    yield put
    for name in set(sys.modules) - before:
        if name.startswith("acme") or str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


@pytest.fixture(scope="module", autouse=True)
def _kept_overrides():
    """What modules that the tests import put above other rules ends with the tests."""
    registry = process.default_registry()
    before = {op: list(entries) for op, entries in registry._overrides.items()}
    yield
    registry._overrides = before
    registry.changed()
