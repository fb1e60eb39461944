import pytest

pytest_plugins = ["shardwise.testing.pytest_plugin"]

IMPORT_SECONDS = 180.0


@pytest.fixture
def ranks(pool):
    """Four ranks that have imported peft, which must not count as a hang."""
    return prepared(pool)


def prepared(pool):
    if not pool.pids:
        pool.run(import_models, timeout=IMPORT_SECONDS)
    return pool


def import_models():
    import adapted  # noqa: F401
