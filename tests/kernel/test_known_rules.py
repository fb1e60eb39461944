"""Which distributions are known to have an op: what ships with shardwise, held up to date, and the directory."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from known_ops import indices, stems_of, text

from shardwise.discovery.process import default_registry
from shardwise.errors import NoRuleError
from shardwise.kernel.first_party import FAMILIES, is_first_party, requirement
from shardwise.kernel.known_rules import OPS, known_names, known_plugins, ops_of_families, providers
from shardwise.kernel.signature import op_name


def test_every_op_of_the_families_is_known_and_by_its_own():
    has = {op_name(entry.op): entry.origin.plugin for entry in default_registry().ops()}
    own = {name: plugin for name, plugin in has.items() if plugin in FAMILIES}
    assert own.items() <= ops_of_families().items(), "run nox -s known_ops"


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="written with the newest torch that is tested")
def test_the_table_is_up_to_date():
    assert OPS.read_text() == text(), "run nox -s known_ops"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_index_of_a_family_has_the_ops_of_its_modules_and_every_module(family):
    package = family.replace("-", "_")
    index = {name: set(stems.split()) for name, stems in import_module(f"{package}.index").MODULES.items()}
    stems = stems_of(package)
    assert stems.keys() <= index.keys(), "run nox -s known_ops"
    assert all(stems[name] <= index[name] for name in stems), "run nox -s known_ops"


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="written with the newest torch that is tested")
def test_the_indices_are_up_to_date():
    assert [path for path, text in indices() if path.read_text() != text] == [], "run nox -s known_ops"


def test_the_families_are_those_of_the_checkout():
    folders = (Path(__file__).parents[2] / "plugins").glob("shardwise_*/plugin.py")
    assert sorted(FAMILIES) == sorted(path.parent.name.replace("_", "-") for path in folders)
    assert set(ops_of_families().values()) == set(FAMILIES)


def test_who_has_an_op():
    assert providers("aten.cholesky.default") == ("shardwise-linalg",)
    assert providers("aten._fft_r2c.default") == ("shardwise-spectral", "shardwise-fft")
    assert providers("shardwise_quant.int4_linear.default") == ("shardwise-quant",)
    assert providers("acme.unknown.default") == ()


def test_names_of_the_directory_are_names_that_somebody_has():
    assert {plugin.name for plugin in known_plugins()} | {"shardwise", "shardwise-core", *FAMILIES} == known_names()


def test_what_ships_is_required_in_the_version_of_core_and_others_in_any():
    assert requirement("shardwise-linalg").startswith("shardwise-linalg==")
    assert requirement("shardwise-fft") == "shardwise-fft"
    assert not is_first_party("shardwise-fft")


def test_neither_file_is_read_before_the_error_is_made():
    for read in (ops_of_families, known_plugins):
        read.cache_clear()
    default_registry().lookup(torch.ops.aten.mm.default)
    assert ops_of_families.cache_info().misses == known_plugins.cache_info().misses == 0
    with pytest.raises(NoRuleError):
        default_registry().lookup(torch.ops.aten._copy_from_and_resize.default)
    assert ops_of_families.cache_info().misses == known_plugins.cache_info().misses == 1
