"""What a fork server imports before it starts workers, so that no worker has to: torch, shardwise and all plugins."""

from contextlib import suppress

# The first op of each process imports torch._dynamo, and its first compilation the rest: that takes a second.
import torch._dynamo.backends.debugging
import torch._inductor.compile_fx  # noqa: F401

import shardwise.testing.worker  # noqa: F401
from shardwise.discovery.process import default_registry

# A worker that asks for its registry then gets the error itself.
with suppress(Exception):
    default_registry()
