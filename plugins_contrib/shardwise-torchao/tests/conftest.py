"""What every test has: the worker pool."""

import os

import pytest

# What somebody measured on this machine must not decide what tests see; worker processes inherit it.
os.environ["SHARDWISE_LINKS"] = "off"

pytest_plugins = ["shardwise.testing.pytest_plugin"]


def library():
    import torchao.quantization  # noqa: F401


@pytest.fixture(scope="session")
def pool(pool):
    """The workers, with torchao imported: on a busy machine that alone takes longer than a test may."""
    pool.run(library, timeout=240)
    return pool
