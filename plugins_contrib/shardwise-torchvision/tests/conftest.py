"""What every test has: torchvision's kernels, the plugin from its folder, and the worker pool."""

import os

import without_cuda

# What somebody measured on this machine must not decide what tests see; worker processes inherit it.
os.environ["SHARDWISE_LINKS"] = "off"
without_cuda.prepare()

pytest_plugins = ["shardwise.testing.pytest_plugin"]
