"""Discovery: entry points become rules, and every problem is reported instead of swallowed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

GOOD = """
    import torch
    from shardwise.hookspecs import hookimpl
    from shardwise.rule import rule

    @hookimpl
    def shardwise_register(registry):
        registry.add(rule(torch.ops.aten.bincount.default, "R, R -> R"))
"""
LOOKUP = """
    import torch
    from shardwise.discovery import default_registry, statuses
    print(default_registry().lookup(torch.ops.aten.bincount.default).origin)
"""


def plugin(root, name, source, *, group="shardwise.plugins.v1", version="1.0", requires=""):
    """A distribution on a path entry of its own: one module and its metadata, as an installer leaves them."""
    module = name.replace("-", "_") + "_plugin"
    (root / f"{module}.py").write_text(textwrap.dedent(source))
    info = root / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}\n")


def run(root, code, **settings):
    env = {k: v for k, v in os.environ.items() if not k.startswith("SHARDWISE_")}
    env |= {"PYTHONPATH": os.pathsep.join([str(root), env.get("PYTHONPATH", "")]), **settings}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True, timeout=120, check=False
    )


def test_an_installed_plugin_is_live(tmp_path):
    plugin(tmp_path, "acme-kernels", GOOD)
    done = run(tmp_path, LOOKUP)
    assert done.stdout.strip() == "acme-kernels 1.0", done.stderr


def test_importing_shardwise_imports_no_plugin():
    code = """
        import sys, shardwise
        loaded = sorted(m for m in sys.modules if m.startswith("shardwise_"))
        assert not loaded, loaded
    """
    done = run("", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("raise OSError('no libacme.so')", "no libacme.so"),
        ("x = 1", "implements no shardwise_register"),
        (
            "from shardwise.hookspecs import hookimpl\n@hookimpl\ndef shardwise_registr(registry): ...",
            "shardwise_registr",
        ),
        (
            "from shardwise.hookspecs import hookimpl\n@hookimpl\ndef shardwise_register(registry, extra): ...",
            "extra",
        ),
        (
            "from shardwise.hookspecs import hookimpl\n@hookimpl\ndef shardwise_register(registry): registry.add(3)",
            "is a int",
        ),
    ],
    ids=["raises", "no hook", "misspelt hook", "unknown argument", "no rule"],
)
def test_a_broken_plugin_is_left_out_with_a_warning_and_a_reason(tmp_path, source, cause):
    plugin(tmp_path, "acme-broken", source)
    plugin(tmp_path, "acme-kernels", GOOD)
    code = (
        LOOKUP
        + """
    for s in statuses():
        if s.found.origin.plugin.startswith("acme"):
            print(s.found.origin.plugin, s.status, s.reason)
    """
    )
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert "acme-kernels 1.0" in done.stdout
    assert "acme-broken failed" in done.stdout
    assert cause in done.stdout
    assert "SHARDWISE_DISABLE_PLUGINS=acme-broken" in done.stderr


def test_strict_mode_raises_for_a_broken_plugin(tmp_path):
    plugin(tmp_path, "acme-broken", "raise OSError('no libacme.so')")
    done = run(tmp_path, LOOKUP, SHARDWISE_STRICT="1")
    assert done.returncode != 0
    assert "PluginLoadError" in done.stderr


def test_a_failed_plugin_is_named_when_its_op_is_missing(tmp_path):
    plugin(tmp_path, "acme-broken", "raise OSError('no libacme.so')")
    done = run(tmp_path, LOOKUP)
    assert "NoRuleError" in done.stderr
    assert "acme-broken 1.0 failed to load (OSError: no libacme.so)" in done.stderr


def test_two_plugins_with_one_op_conflict(tmp_path):
    plugin(tmp_path, "acme-kernels", GOOD)
    plugin(tmp_path, "bolt-kernels", GOOD)
    done = run(tmp_path, LOOKUP)
    assert "RuleConflictError" in done.stderr
    assert "acme-kernels 1.0" in done.stderr
    assert "bolt-kernels 1.0" in done.stderr
    settled = run(tmp_path, LOOKUP, SHARDWISE_DISABLE_PLUGINS="bolt-kernels")
    assert settled.stdout.strip() == "acme-kernels 1.0", settled.stderr


STATUS = """
    import warnings
    from shardwise.discovery import statuses
    for s in statuses():
        if s.found.origin.plugin.startswith("acme"):
            print(s.status, "|", s.reason)
"""


def test_another_major_version_is_listed_as_needing_upgrade(tmp_path):
    plugin(tmp_path, "acme-old", GOOD, group="shardwise.plugins.v0")
    assert run(tmp_path, STATUS).stdout.startswith("needs upgrade | it registers under shardwise.plugins.v0")


def test_a_plugin_for_another_shardwise_is_refused_before_import(tmp_path):
    plugin(tmp_path, "acme-new", "raise OSError('imported')", requires="shardwise>=99")
    done = run(tmp_path, STATUS)
    assert done.stdout.startswith("refused | it needs shardwise>=99"), done.stderr
    assert "imported" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"SHARDWISE_PLUGINS": "shardwise-views"}, "not in SHARDWISE_PLUGINS"),
        ({"SHARDWISE_PLUGINS": ""}, "not in SHARDWISE_PLUGINS"),
        ({"SHARDWISE_DISABLE_PLUGINS": "acme-kernels"}, "in SHARDWISE_DISABLE_PLUGINS"),
        ({"SHARDWISE_AUTOLOAD": "no"}, "SHARDWISE_AUTOLOAD is off"),
    ],
)
def test_settings_block_a_plugin(tmp_path, settings, reason):
    plugin(tmp_path, "acme-kernels", GOOD)
    assert run(tmp_path, STATUS, **settings).stdout.strip() == f"blocked | {reason}"


def test_an_unknown_name_in_a_setting_is_an_error(tmp_path):
    done = run(tmp_path, STATUS, SHARDWISE_PLUGINS="acme-misspelt")
    assert "SettingsError" in done.stderr
    assert "there is no plugin acme-misspelt" in done.stderr


def test_a_disabled_first_party_plugin_takes_exactly_its_ops(tmp_path):
    code = """
        import torch
        from shardwise.discovery import default_registry
        registry = default_registry()
        assert torch.ops.aten.add.Tensor in registry
        registry.lookup(torch.ops.aten.mm.default)
    """
    done = run(tmp_path, code, SHARDWISE_DISABLE_PLUGINS="shardwise-matmul")
    assert "NoRuleError" in done.stderr
    assert "aten.mm.default" in done.stderr
