"""Every rule of every first-party plugin, with the samples that its authors give, for the run of the oracle."""

from functools import cache
from importlib import import_module
from pathlib import Path

from shardwise.discovery.entry_points import discover
from shardwise.discovery.loading import load
from shardwise.errors import PluginLoadError
from shardwise.kernel.registry import Registry
from shardwise.kernel.signature import op_name

HERE = Path(__file__).parent


def first_party():
    return [plugin for plugin in discover() if plugin.first_party]


def rules_of(found):
    """The rules of one plugin, loaded by itself, and the error that loading it gave, if any."""
    registry = Registry()
    try:
        load([found], registry)
    except PluginLoadError as error:
        return [], error
    return registry.rules(), None


@cache
def samples_file(plugin):
    """The module ``samples_<family>.py`` beside this one, or None."""
    name = f"samples_{plugin.removeprefix('shardwise-')}"
    return import_module(name) if (HERE / f"{name}.py").exists() else None


def declared(plugin, what):
    """``SAMPLES``, ``STAND_INS`` or ``UNSAMPLED`` (op -> reason) of a plugin's samples file, or nothing."""
    return getattr(samples_file(plugin), what, {})


def rule_id(plugin, rule):
    more = f"+{len(rule.ops) - 1}" if len(rule.ops) > 1 else ""
    return f"{plugin.removeprefix('shardwise-')}-{op_name(rule.ops[0]).removeprefix('aten.')}{more}"
