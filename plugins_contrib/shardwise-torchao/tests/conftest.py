"""What every test has: the worker pool."""

import os

# What somebody measured on this machine must not decide what tests see; worker processes inherit it.
os.environ["SHARDWISE_LINKS"] = "off"

pytest_plugins = ["shardwise.testing.pytest_plugin"]
