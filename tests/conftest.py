"""What every test has: the worker pool, and a skip with its reason for tests that need a GPU."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# What somebody measured on this machine must not decide what tests see; worker processes inherit it.
os.environ["SHARDWISE_LINKS"] = "off"

# A busy machine is slow, not wrong.
settings.register_profile("shardwise", deadline=None)
settings.load_profile("shardwise")

pytest_plugins = ["shardwise.testing.pytest_plugin"]


def pytest_configure(config):
    """Register the fixtures of environments.py, which no search path leads to."""
    if not config.pluginmanager.has_plugin("environments"):
        spec = importlib.util.spec_from_file_location("environments", Path(__file__).with_name("environments.py"))
        module = sys.modules["environments"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        config.pluginmanager.register(module, "environments")


def pytest_runtest_setup(item):
    if item.get_closest_marker("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none here")
