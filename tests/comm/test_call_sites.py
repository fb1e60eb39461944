"""Where in a program a collective was issued, and what the program called there."""

from pathlib import Path

import pytest

import shardwise as sw
from shardwise.comm.call_sites import in_line, is_inner, site_of
from shardwise.errors import ShardingError


@pytest.mark.parametrize("name", ["distribute_tensor", "zeros"])
def test_a_function_of_shardwise_is_named_as_the_program_called_it(name):
    with pytest.raises((ShardingError, TypeError)) as refused:
        getattr(sw, name)("no tensor", device_mesh="no mesh")
    frames = refused.traceback
    assert in_line(site_of(frames[-1].frame.raw)).startswith(f"{name} at ")


def test_the_line_of_a_call_is_one_of_the_program_whichever_package_of_ours_is_below():
    """``checkpoint.save`` waits where the program calls it; the commands and the kit run code as a program does."""
    core = Path(sw.__file__).parent
    packages = {path.name for path in core.iterdir() if (path / "__init__.py").exists()}
    assert {name for name in packages if not is_inner[str(core / name / "file.py")]} == {"cli", "demo", "testing"}


@pytest.mark.parametrize(
    ("name", "call"),
    [("save", lambda: sw.checkpoint.save({}, 3, step=1)), ("learn", lambda: sw.learn("yes"))],
)
def test_a_package_above_the_tensors_is_named_as_the_program_called_it(name, call):
    with pytest.raises((ShardingError, TypeError)) as refused:
        call()
    frames = refused.traceback
    assert in_line(site_of(frames[-1].frame.raw)).startswith(f"{name} at ")
