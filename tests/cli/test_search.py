"""``shardwise plugins search``: plugins that are known, installed or not."""

import json

import pytest
from click.testing import CliRunner

from shardwise.cli import main
from shardwise.kernel.known_rules import known_plugins


def search(*words, exit_code=0):
    result = CliRunner().invoke(main, ["plugins", "search", *words])
    assert result.exit_code == exit_code, result.output
    return result.output


def names(*words):
    return [row["plugin"] for row in json.loads(search(*words, "--json"))]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("fft",), ["shardwise-spectral", "shardwise-fft"]),
        (("FFT", "dims"), ["shardwise-fft"]),
        (("aten::_int_mm",), ["shardwise-matmul", "shardwise-quant"]),
        (("aten._int_mm.default",), ["shardwise-matmul", "shardwise-quant"]),
        (("shardwise_quant.int4_linear.default",), ["shardwise-quant"]),
        (("cholesky",), ["shardwise-linalg"]),
        (("attention", "ring"), ["shardwise-ring-attention"]),
    ],
    ids=" ".join,
)
def test_by_words_and_by_ops(words, expected):
    assert names(*words) == expected


def test_a_row_says_whether_it_is_installed_and_what_the_oracle_said():
    family, other = json.loads(search("fft", "--json"))
    assert family["installed"] == family["version"]
    assert (other["installed"], other["oracle"]) == ("no", "6 ops, 128 rows, 150 cases: 0 refuted")
    assert other["home"]
    output = search("fft")
    assert "aten._fft_c2c.default, aten._fft_c2c.out, aten._fft_c2r.default and 3 more" in output
    assert "0 refuted" in output


def test_nothing_is_found():
    output = search("no-such-thing", exit_code=1)
    assert "no plugin that is known matches 'no-such-thing'" in output
    assert json.loads(search("no-such-thing", "--json", exit_code=1).partition("Error")[0]) == []


def test_every_entry_of_the_directory_is_found_by_its_name():
    for plugin in known_plugins():
        assert plugin.name in names(plugin.name)
        assert plugin.ops
        assert plugin.summary
        assert plugin.oracle.endswith("0 refuted")
