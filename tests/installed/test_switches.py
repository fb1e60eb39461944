"""Settings, by environment variable and by pyproject.toml: allow-list, disable list, autoload, unknown names."""

import pytest

pytestmark = pytest.mark.slow  # environments take seconds each: .ci/run takes those that are marked

FATES = """
    import json, sys
    from shardwise.discovery.process import statuses
    found = {s.plugin.origin.plugin: [s.status, s.reason] for s in statuses()}
    names = ("acme-kernels", "bolt-kernels", "shardwise-conv")
    imported = [m for m in ("acme_kernels_plugin", "bolt_kernels_plugin", "shardwise_conv.plugin") if m in sys.modules]
    print(json.dumps([[found[n] for n in names], imported]))
"""
LOADED = ["loaded", ""]


@pytest.fixture(scope="module")
def two(tmp_path_factory, shardwise_wheel, installed):
    folder = tmp_path_factory.mktemp("two")
    _values_copy = installed.source_of("_values_copy", "R -> R")
    wheels = [installed.make_wheel(folder, "acme-kernels"), installed.make_wheel(folder, "bolt-kernels", _values_copy)]
    return installed.Environment(folder / "env").install(shardwise_wheel, *wheels)


def blocked(reason):
    return ["blocked", reason]


@pytest.mark.sample
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [LOADED] * 3),
        ({"SHARDWISE_PLUGINS": ""}, [blocked("not in SHARDWISE_PLUGINS")] * 3),
        (
            {"SHARDWISE_PLUGINS": "Acme_Kernels, shardwise"},
            [LOADED, blocked("not in SHARDWISE_PLUGINS"), LOADED],
        ),
        (
            {"SHARDWISE_DISABLE_PLUGINS": "acme-kernels,shardwise-conv"},
            [blocked("in SHARDWISE_DISABLE_PLUGINS"), LOADED, blocked("in SHARDWISE_DISABLE_PLUGINS")],
        ),
        ({"SHARDWISE_AUTOLOAD": "no"}, [blocked("SHARDWISE_AUTOLOAD is off")] * 3),
        (
            {"SHARDWISE_AUTOLOAD": "False", "SHARDWISE_PLUGINS": "bolt-kernels"},
            [blocked("SHARDWISE_AUTOLOAD is off"), LOADED, blocked("SHARDWISE_AUTOLOAD is off")],
        ),
    ],
    ids=["unset", "empty allow-list", "allow-list", "disable list", "autoload off", "autoload off but named"],
)
def test_what_the_environment_says_of_each_plugin_and_what_is_imported(two, settings, expected):
    fates, imported = two.answer(FATES, **settings)
    assert fates == expected
    modules = ("acme_kernels_plugin", "bolt_kernels_plugin", "shardwise_conv.plugin")
    assert imported == [m for m, fate in zip(modules, expected, strict=True) if fate == LOADED]


@pytest.mark.sample
@pytest.mark.parametrize("variable", ["SHARDWISE_PLUGINS", "SHARDWISE_DISABLE_PLUGINS", "SHARDWISE_PREFER"])
def test_an_unknown_name_is_an_error_that_lists_the_known_ones(two, variable):
    value = "aten.mm=acme-misspelt" if variable == "SHARDWISE_PREFER" else "acme-misspelt"
    done = two.run(FATES, **{variable: value})
    assert f"SettingsError: read {variable}: there is no plugin acme-misspelt" in done.stderr
    assert "acme-kernels, bolt-kernels" in done.stderr


def test_pyproject_of_a_folder_above_says_the_same_and_the_environment_goes_before_it(two, tmp_path):
    (tmp_path / "pyproject.toml").write_text('[tool.shardwise]\ndisable-plugins = ["acme-kernels"]\nautoload = true\n')
    below = tmp_path / "deep" / "er"
    below.mkdir(parents=True)
    (below.parent / "pyproject.toml").write_text("[tool.other]\n")
    fates, _ = two.answer(FATES, cwd=below)
    assert fates[0] == blocked(f"in 'disable-plugins' in [tool.shardwise] of {tmp_path / 'pyproject.toml'}")
    assert fates[1:] == [LOADED, LOADED]
    fates, _ = two.answer(FATES, cwd=below, SHARDWISE_DISABLE_PLUGINS="bolt-kernels")
    assert fates == [LOADED, blocked("in SHARDWISE_DISABLE_PLUGINS"), LOADED]
