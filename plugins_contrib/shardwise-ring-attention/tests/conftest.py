"""The worker pool."""

pytest_plugins = ["shardwise.testing.pytest_plugin"]
