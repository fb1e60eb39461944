import importlib.util
import sys
from pathlib import Path

import pytest

pytest_plugins = ["shardwise.testing.pytest_plugin"]


def load(path):
    """A module of this folder under its own name, here and in the workers of the pool, which cannot import tests."""
    name = f"bridge_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture(scope="session")
def kernels():
    return load(Path(__file__).with_name("kernels.py"))


@pytest.fixture(scope="session")
def classic():
    return load(Path(__file__).with_name("classic_rules.py"))


@pytest.fixture(scope="session")
def loader():
    return load
