"""Fixtures for tests of rules and programs; opt in with ``pytest_plugins = ["shardwise.testing.pytest_plugin"]``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from shardwise.testing.isolated import IsolatedRegistry
    from shardwise.testing.locks import CommunicationLock
    from shardwise.testing.pool import WorkerPool

    PoolFactory = Callable[..., WorkerPool]

# The fixtures import what they give: a process of pytest that only shares tests out needs no torch.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Pytest's hook for options."""
    group = parser.getgroup("shardwise")
    group.addoption("--update-locks", action="store_true", help="Write the lockfiles of communication_lock anew.")


@pytest.fixture(scope="session")
def pool_of() -> Iterator[PoolFactory]:
    """``pool_of(world_size, backend="gloo")``: one pool per size and backend for the whole test run."""
    from shardwise.testing.pool import WorkerPool

    pools: dict[tuple[int, str], WorkerPool] = {}
    with ExitStack() as stack:

        def make(world_size: int, backend: str = "gloo") -> WorkerPool:
            if (world_size, backend) not in pools:
                pools[world_size, backend] = stack.enter_context(WorkerPool(world_size, backend))
            return pools[world_size, backend]

        yield make


@pytest.fixture(scope="session")
def pool(pool_of: PoolFactory) -> WorkerPool:
    """Four gloo workers, started by the first test that runs something on them."""
    return pool_of(4)


@pytest.fixture
def registry() -> Iterator[IsolatedRegistry]:
    """An empty registry in place of this process's: ``registry.add(RULE)``. The workers of a pool keep theirs."""
    from shardwise.testing.isolated import isolated_registry

    with isolated_registry() as empty:
        yield empty


@pytest.fixture
def installed_registry() -> Iterator[IsolatedRegistry]:
    """As ``registry``, with the rules of all installed plugins in it."""
    from shardwise.testing.isolated import isolated_registry

    with isolated_registry(installed=True) as with_plugins:
        yield with_plugins


@pytest.fixture
def communication_lock(request: pytest.FixtureRequest) -> CommunicationLock:
    """``communication_lock(step, mesh)``: a step sends what the lockfile beside the test says.

    ``step(mesh)`` is as for ``shardwise lock``; ``mesh`` is ``{"dp": 2, "tp": 4}`` or ``(2, 4)``. The lockfile has the
    name of the test's file, of the test, and of the class that the test is in. ``pytest --update-locks`` writes it, but
    not where CI is set.
    """
    from shardwise.testing.locks import CommunicationLock  # few tests need what it imports

    update = bool(request.config.getoption("--update-locks", default=False))
    classes = [node.name for node in request.node.listchain() if isinstance(node, pytest.Class)]
    return CommunicationLock(request.node.path, ".".join([*classes, request.node.name]), update)
