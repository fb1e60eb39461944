"""What a fork server imports before it starts workers, so that no worker has to: torch, shardwise and all plugins."""

from contextlib import suppress

import torch._dynamo  # noqa: F401  # the first op of each process imports it

import shardwise.testing.worker  # noqa: F401
from shardwise.discovery.process import default_registry

# A worker that asks for its registry then gets the error itself.
with suppress(Exception):
    default_registry()
