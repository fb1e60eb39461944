"""What importing a plugin's module and calling its hook pulls in, seen from a fresh process."""

import pytest

from shardwise.errors import PluginLoadError
from shardwise.testing.light import heavy_imports, probe

HOOK = """
from shardwise.hookspecs import hookimpl
@hookimpl
def shardwise_register(registry):
    {}
"""
TEXTS = {
    "cheap": "import shardwise.rule, wave" + HOOK.format("import json"),
    "costly": "import hypothesis" + HOOK.format("pass"),
    "hooked": HOOK.format("import probed_heavy, probed_stated"),
    "compiles": "import torch._dynamo" + HOOK.format("pass"),
    "raises": "raise OSError('no libacme.so')",
    "hook_raises": HOOK.format("raise OSError('no libacme.so')"),
    "ends": "import os; os._exit(7)",
    "heavy": "",
    "stated": "",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    for name, text in TEXTS.items():
        (folder / f"probed_{name}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def told(folder):
    """The answers of one process about all modules but the one that ends it."""
    names = ("cheap", "costly", "hooked", "compiles", "raises", "hook_raises")
    return probe([f"probed_{name}" for name in names], [folder])


@pytest.mark.slow
@pytest.mark.sample
def test_what_comes_along(told, folder):
    assert told["probed_cheap"].pulled == ()
    assert told["probed_cheap"].file == str(folder / "probed_cheap.py")
    assert "hypothesis" in told["probed_costly"].pulled
    assert told["probed_hooked"].pulled == ("probed_heavy", "probed_stated")
    assert "torch._dynamo" in told["probed_compiles"].pulled
    assert told["probed_raises"].error == "OSError: no libacme.so"
    assert (told["probed_hook_raises"].error, told["probed_hook_raises"].hook_error) == ("", "OSError: no libacme.so")


@pytest.mark.slow
@pytest.mark.sample
def test_what_is_stated_may_be(told, monkeypatch):
    monkeypatch.setattr("shardwise.testing.light.probe", lambda modules: {name: told[name] for name in modules})
    assert heavy_imports("probed_hooked", allowed=("probed_stated",)) == ["probed_heavy"]


def test_a_module_that_ends_the_process(folder, monkeypatch):
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(PluginLoadError, match=r"import probed_ends in a fresh process: .* ends the process with 7"):
        heavy_imports("probed_ends")
