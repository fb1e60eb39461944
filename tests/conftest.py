"""What every test has: the worker pool, and a skip with its reason for tests that need a GPU."""

import os

import pytest
import torch
from hypothesis import settings

# What somebody measured on this machine must not decide what tests see; worker processes inherit it.
os.environ["SHARDWISE_LINKS"] = "off"

# A busy machine is slow, not wrong.
settings.register_profile("shardwise", deadline=None)
settings.load_profile("shardwise")

pytest_plugins = ["shardwise.testing.pytest_plugin"]


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none here")
