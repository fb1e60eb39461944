"""What a fork server imports before it starts workers, so that no worker has to: torch, shardwise and all plugins."""

from contextlib import suppress

import shardwise.testing.worker
from shardwise.discovery.process import default_registry

with suppress(ImportError):  # where torch has its compiler elsewhere, each worker imports it
    import shardwise.private_torch.compilers  # noqa: F401

# A worker that asks for its registry then gets the error itself.
with suppress(Exception):
    default_registry()
