"""Where in a program a collective was issued, and what the program called there."""

import pytest

import shardwise as sw
from shardwise.comm.call_sites import in_line, site_of
from shardwise.errors import ShardingError


@pytest.mark.parametrize("name", ["distribute_tensor", "zeros"])
def test_a_function_of_shardwise_is_named_as_the_program_called_it(name):
    with pytest.raises((ShardingError, TypeError)) as refused:
        getattr(sw, name)("no tensor", device_mesh="no mesh")
    frames = refused.traceback
    assert in_line(site_of(frames[-1].frame.raw)).startswith(f"{name} at ")
