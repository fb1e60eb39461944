"""Counts in messages."""

from pathlib import Path

import pytest

import shardwise
from shardwise.errors import ShardingError
from shardwise.kernel.placements import Shard, check_placements
from shardwise.kernel.plurals import counted

CORE = Path(shardwise.__file__).parent


@pytest.mark.parametrize(
    ("number", "what", "shown"),
    [
        (1, "placement", "1 placement"),
        (0, "placement", "0 placements"),
        (2, "entry", "2 entries"),
        (1, "entry", "1 entry"),
        (2, "key", "2 keys"),
        (3, "mesh", "3 meshes"),
    ],
)
def test_a_count_and_its_noun(number, what, shown):
    assert counted(number, what) == shown


def test_an_error_of_one_placement_says_so():
    with pytest.raises(ShardingError, match=r"1 placement for a mesh of 2 dims"):
        check_placements([Shard(0)], 2, 2)
