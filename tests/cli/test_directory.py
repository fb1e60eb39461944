"""The directory of plugins says of the contrib distributions what `shardwise plugins check` says of them."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from attrs import evolve

from shardwise.kernel.known_rules import known_plugins

CONTRIB = Path(__file__).parents[2] / "plugins_contrib"
OF_CONTRIB = [plugin for plugin in known_plugins() if (CONTRIB / plugin.name).is_dir()]
GROUP = "shardwise.plugins.v1"
# What samples of a plugin import besides, which need not be installed here. Its own tests run the same check.
LIBRARIES = {"shardwise-torchvision": "torchvision", "shardwise-torchao": "torchao"}


def project(name):
    return tomllib.loads((CONTRIB / name / "pyproject.toml").read_text())["project"]


def test_every_contrib_plugin_is_listed_with_its_version_and_has_the_keyword():
    plugins = [path.parent.name for path in CONTRIB.glob("*/pyproject.toml") if GROUP in path.read_text()]
    assert sorted(plugins) == sorted(plugin.name for plugin in OF_CONTRIB)
    for plugin in OF_CONTRIB:
        assert project(plugin.name)["version"] == plugin.version
        assert "shardwise" in project(plugin.name)["keywords"]


@pytest.mark.slow
@pytest.mark.parametrize("plugin", OF_CONTRIB, ids=lambda plugin: plugin.name)
def test_the_oracle_says_what_the_directory_says(plugin):
    library = LIBRARIES.get(plugin.name, "torch")
    if subprocess.run([sys.executable, "-c", f"import {library}"], capture_output=True, check=False).returncode:
        pytest.skip(f"{library} is not installed here, or does not load")
    command = [sys.executable, "-m", "shardwise.cli", "plugins", "check", "--json", str(CONTRIB / plugin.name)]
    source = str(CONTRIB / plugin.name / "src")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), source]))
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    (oracle,) = [row for row in json.loads(done.stdout) if row["check"] == "oracle"]
    assert (oracle["result"], oracle["found"]) == ("ok", plugin.oracle)


@pytest.mark.slow
@pytest.mark.parametrize("plugin", OF_CONTRIB, ids=lambda plugin: plugin.name)
def test_the_patterns_are_those_of_its_ops(plugin):
    code = (
        "import importlib, json, sys\n"
        "from shardwise.kernel.precedence import Origin\n"
        "from shardwise.kernel.registrar import Registrar\n"
        "from shardwise.kernel.signature import op_name\n"
        "registrar = Registrar(Origin('one', 'one'))\n"
        "importlib.import_module(sys.argv[1]).shardwise_register(registrar)\n"
        "later = [name.replace('::', '.') for name in registrar.later]\n"
        "named = [name if name.count('.') > 1 else f'{name}.default' for name in later]\n"
        "print(json.dumps([op_name(entry.op) for entry in registrar.entries] + named))\n"
    )
    source = str(CONTRIB / plugin.name / "src")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), source]))
    module = project(plugin.name)["entry-points"][GROUP][plugin.name]
    command = [sys.executable, "-c", code, module]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    ops = json.loads(done.stdout)
    assert [op for op in ops if not plugin.has(op)] == []
    assert [one for one in plugin.ops if not any(evolve(plugin, ops=(one,)).has(op) for op in ops)] == []
