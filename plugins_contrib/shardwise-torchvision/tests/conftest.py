"""What every test has: torchvision's kernels, the plugin from its folder, and the worker pool."""

import os

import pytest
import without_cuda

# What somebody measured on this machine must not decide what tests see; worker processes inherit it.
os.environ["SHARDWISE_LINKS"] = "off"
without_cuda.prepare()

pytest_plugins = ["shardwise.testing.pytest_plugin"]


def library():
    import torchvision  # noqa: F401


@pytest.fixture(scope="session")
def pool(pool):
    """The workers, with torchvision imported: on a busy machine that alone takes longer than a test may."""
    pool.run(library, timeout=240)
    return pool
