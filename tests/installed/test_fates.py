"""What becomes of an installed plugin: loaded, failed, blocked, refused or needing an upgrade; none is dropped."""

import json
import subprocess

import pytest

FATES = """
    import json, sys, warnings
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        from shardwise.discovery.process import statuses
        found = [(s.plugin.origin.plugin, s.status, s.reason) for s in statuses()]
    said = [str(w.message) for w in caught if "shardwise" in str(w.message)]
    imported = sorted(m for m in sys.modules if m.startswith(("acme", "bolt")))
    acme = {name: [status, reason] for name, status, reason in found if name.startswith(("acme", "bolt"))}
    told = {"acme": acme, "order": [f[0] for f in found], "said": said, "imported": imported}
"""
TOLD = FATES + "    print(json.dumps(told))\n"
LOOKUP = """
    import torch
    from shardwise.discovery.process import default_registry
    print(default_registry().lookup(torch.ops.aten._copy_from_and_resize.default).origin)
"""


# What is asked of the environment with all fates, in one process.
ASKED = (
    FATES
    + """
    from importlib.metadata import distribution
    import torch
    from shardwise.discovery.process import default_registry
    from shardwise.errors import NoRuleError
    told["groups"] = sorted({e.group for e in distribution("shardwise").entry_points})
    try:
        default_registry().lookup(torch.ops.aten._values_copy.default)
    except NoRuleError as error:
        told["miss"] = str(error)
    told["tracebacks"] = [s.traceback for s in statuses() if s.status == "failed"]
    print(json.dumps(told))
"""
)


@pytest.fixture(scope="module")
def fates(zoo):
    return zoo.answer(ASKED)


@pytest.mark.slow
@pytest.mark.sample
def test_a_plugin_that_pip_installed_is_live(fates):
    assert fates["acme"]["acme-kernels"] == ["loaded", ""]


def test_a_plugin_of_an_older_major_is_listed_as_needing_an_upgrade_and_not_imported(fates):
    status, reason = fates["acme"]["acme-old"]
    assert status == "needs upgrade"
    assert "shardwise.plugins.v0" in reason
    assert "upgrade the plugin" in reason
    assert "acme_old_plugin" not in fates["imported"]


def test_a_plugin_of_a_newer_major_says_that_shardwise_is_too_old(fates):
    status, reason = fates["acme"]["acme-coming"]
    assert status == "needs upgrade"
    assert "upgrade this shardwise" in reason
    assert "acme_coming_plugin" not in fates["imported"]


def test_a_plugin_for_another_version_is_refused_before_import(fates):
    status, reason = fates["acme"]["acme-new"]
    assert status == "refused"
    assert reason.startswith("it needs shardwise>=99 and ")
    assert "acme_new_plugin" not in fates["imported"]


def test_a_broken_plugin_is_caught_with_one_warning(fates):
    assert fates["acme"]["acme-broken"] == ["failed", "OSError: no libacme.so"]
    (said,) = fates["said"]
    assert "acme-broken 1.0" in said  # distribution and version
    assert "OSError: no libacme.so" in said
    assert "SHARDWISE_DISABLE_PLUGINS=acme-broken" in said


def test_the_order_is_by_name(fates):
    assert fates["order"] == sorted(fates["order"])


def test_a_broken_plugin_leaves_no_rule_its_traceback_is_kept_and_a_miss_names_it(fates):
    assert "acme-broken 1.0 failed to load (OSError: no libacme.so)" in fates["miss"]
    (traceback,) = fates["tracebacks"]
    assert "acme_broken_plugin.py" in traceback


STRICT = """
    import json
    import torch
    from shardwise.discovery.loading import load
    from shardwise.discovery.process import default_registry
    from shardwise.errors import PluginLoadError
    from shardwise.discovery.entry_points import discover
    from shardwise.kernel.registry import Registry

    said = {}
    for found in discover():
        if found.origin.plugin.startswith("acme"):
            try:
                load([found], Registry())
            except PluginLoadError as error:
                said[found.origin.plugin] = str(error)
    try:
        default_registry().lookup(torch.ops.aten._copy_from_and_resize.default)
    except PluginLoadError as error:
        said["a look-up"] = str(error)
    print(json.dumps(said))
"""


@pytest.mark.slow
@pytest.mark.sample
def test_strict_mode_raises_for_any_problem_at_load(zoo):
    said = zoo.answer(STRICT, SHARDWISE_STRICT="yes")
    assert said.pop("a look-up").startswith("load the plugin acme-broken 1.0: OSError: no libacme.so")
    assert set(said) == {"acme-broken", "acme-old", "acme-new", "acme-coming"}
    for name, message in said.items():
        assert message.startswith(f"load the plugin {name} 1.0: ")


BROKEN = {
    "no hook": ("x = 1", "implements no shardwise_register"),
    "misspelt": (
        "from shardwise.hookspecs import hookimpl\n@hookimpl\ndef shardwise_registr(registry): ...",
        "shardwise_registr",
    ),
    "unknown argument": (
        "from shardwise.hookspecs import hookimpl\n@hookimpl\ndef shardwise_register(registry, more): ...",
        "more",
    ),
    "no rule": (
        "from shardwise.hookspecs import hookimpl\n@hookimpl\ndef shardwise_register(registry): registry.add(3)",
        "is an int",
    ),
    "exits": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "absent": ("import acme_nowhere", "No module named 'acme_nowhere'"),
    "asks": (
        "from shardwise.discovery.process import default_registry\ndefault_registry()",
        "the plugins are just being loaded",
    ),
}


@pytest.fixture(scope="module")
def broken(tmp_path_factory, shardwise_wheel, installed):
    """One environment for all that is wrong, so that a plugin after a broken one is seen not to be blamed for it."""
    folder = tmp_path_factory.mktemp("broken")
    wheels = [installed.make_wheel(folder, f"acme-{i}", source) for i, (source, _) in enumerate(BROKEN.values())]
    env = installed.Environment(folder / "env")
    return env.install(shardwise_wheel, *wheels, installed.make_wheel(folder, "bolt-kernels"))


@pytest.mark.slow
@pytest.mark.sample
def test_whatever_is_wrong_with_plugins_is_caught_for_each_and_the_next_one_loads(broken):
    answer = broken.answer(TOLD)
    for i, (_, cause) in enumerate(BROKEN.values()):
        status, reason = answer["acme"][f"acme-{i}"]
        assert status == "failed"
        assert cause in reason
    assert answer["acme"]["bolt-kernels"] == ["loaded", ""]
    assert len(answer["said"]) == len(BROKEN)


@pytest.mark.slow
@pytest.mark.sample
def test_a_broken_first_party_plugin_is_fatal(broken):
    plugin = broken.site / "shardwise_conv" / "plugin.py"
    whole = plugin.read_text()
    plugin.write_text("raise OSError('half an installation')")
    try:
        done = broken.run(LOOKUP)
    finally:
        plugin.write_text(whole)
    assert "PluginLoadError: load the plugin shardwise-conv" in done.stderr
    assert "half an installation" in done.stderr


@pytest.mark.slow
@pytest.mark.sample
def test_a_plugin_for_several_majors_is_used_by_the_one_that_fits(environment, wheel):
    entries = {f"shardwise.plugins.v{n}": {"acme-kernels": "acme_kernels_plugin"} for n in (0, 1, 2)}
    assert environment(wheel("acme-kernels", entries=entries)).answer(TOLD)["acme"] == {"acme-kernels": ["loaded", ""]}


@pytest.mark.slow
@pytest.mark.sample
def test_two_distributions_with_one_entry_name_are_both_loaded(environment, wheel):
    _values_copy = "import torch\n" + VALUES_COPY
    wheels = [
        wheel("acme-kernels"),
        wheel("bolt-kernels", _values_copy, entries={"shardwise.plugins.v1": {"acme-kernels": "bolt_kernels_plugin"}}),
    ]
    code = """
        import json, torch
        from shardwise.discovery.process import default_registry
        look = default_registry().lookup
        names = ("_copy_from_and_resize", "_values_copy")
        print(json.dumps([str(look(getattr(torch.ops.aten, n).default).origin) for n in names]))
    """
    assert environment(*wheels).answer(code) == ["acme-kernels 1.0", "acme-kernels (bolt-kernels 1.0)"]


VALUES_COPY = """
from shardwise.hookspecs import hookimpl
from shardwise.rule import rule

@hookimpl
def shardwise_register(registry):
    registry.add(rule(torch.ops.aten._values_copy.default, "R -> R"))
"""


@pytest.mark.slow
@pytest.mark.sample
def test_stale_metadata_in_front_on_the_path_does_not_hide_the_installed_plugin(environment, wheel):
    env = environment(wheel("acme-kernels", version="2.0"))
    stale = env.cwd / "acme_kernels.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme_kernels\nVersion: 0.9\n")
    (stale / "entry_points.txt").write_text("[shardwise.plugins.v1]\nacme-kernels = acme_nowhere\n")
    code = """
        import json
        from shardwise.discovery.entry_points import discover
        print(json.dumps([[f.origin.version, f.hides] for f in discover() if f.origin.plugin == "acme-kernels"]))
    """
    ((version, hides),) = env.answer(code)
    assert version == "2.0"
    assert hides == [f"acme_kernels 0.9 in {env.cwd.resolve()}"]
    assert env.answer(TOLD)["acme"] == {"acme-kernels": ["loaded", ""]}


@pytest.mark.slow
@pytest.mark.sample
def test_the_command_lists_every_plugin_with_its_fate(zoo):
    done = subprocess.run(
        [str(zoo.folder / "bin" / "shardwise"), "plugins", "--json"],
        env=zoo.environ(SHARDWISE_DISABLE_PLUGINS="shardwise-conv"),
        cwd=zoo.cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    fates = {row["plugin"]: row["status"] for row in json.loads(done.stdout)}
    assert fates["acme-kernels"] == "loaded"
    assert fates["acme-broken"] == "failed"
    assert fates["acme-old"] == fates["acme-coming"] == "needs upgrade"
    assert fates["acme-new"] == "refused"
    assert fates["shardwise-conv"] == "blocked"


def test_nothing_of_shardwise_loads_into_every_pytest(fates):
    assert fates["groups"] == ["console_scripts", "shardwise.plugins.v1"]
