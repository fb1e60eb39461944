"""The plugin as it is installed: what loading it imports, and what the directory of plugins says of it."""

import json
import subprocess
import sys

from shardwise.kernel.known_rules import known_plugins

NAME = "shardwise-torchvision"
LOADED = """
import sys, torch
from shardwise.discovery.process import default_registry
default_registry().lookup(torch.ops.aten.mm.default)
print(*sorted(name for name in sys.modules if name.split(".")[0] in ("torchvision", "shardwise_torchvision")))
"""


def run(*command):
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=True).stdout


def test_a_plugin_that_is_loaded_imports_neither_torchvision_nor_rules():
    assert run("-c", LOADED).split() == ["shardwise_torchvision", "shardwise_torchvision.plugin"]


def test_the_check_says_what_the_directory_says():
    rows = json.loads(run("-m", "shardwise.cli", "plugins", "check", "--json", NAME))
    (listed,) = [plugin for plugin in known_plugins() if plugin.name == NAME]
    (oracle,) = [row for row in rows if row["check"] == "oracle"]
    assert {row["result"] for row in rows} == {"ok"}
    assert oracle["found"] == listed.oracle
