import pytest

pytest_plugins = ["shardwise.testing.pytest_plugin"]

IMPORT_SECONDS = 180.0


@pytest.fixture
def ranks(pool):
    """Four ranks that have imported transformers, which must not count as a hang."""
    return prepared(pool)


@pytest.fixture
def two_ranks(pool_of):
    return prepared(pool_of(2))


def prepared(pool):
    if not pool.pids:
        pool.run(import_models, timeout=IMPORT_SECONDS)
    return pool


def import_models():
    import architectures  # noqa: F401
