"""What a fork server does before it starts workers, so that no worker has to: import torch, shardwise, all plugins and
the modules of their rules, and read what ranks compare at the first use of a mesh.
"""

from contextlib import suppress

from shardwise.testing.parent_death import kill_with_parent

kill_with_parent()  # a program that is interrupted does not wait for these imports
# ruff: noqa: E402

import click  # noqa: F401  # names the file of links

import shardwise.checkpoint
import shardwise.tensor.modules
import shardwise.testing.meshes
import shardwise.testing.worker
from shardwise.comm.rule_agreement import summary
from shardwise.discovery.process import default_registry

with suppress(ImportError):  # where torch has its compiler elsewhere, each worker imports it
    import shardwise.private_torch.compilers  # noqa: F401
with suppress(ImportError):  # what the functions of most tests use
    import pytest  # noqa: F401

# A worker that asks for its registry, or for a rule of it, then gets the error itself.
with suppress(Exception):
    default_registry().read_modules()
    summary(default_registry())

kill_with_parent(on=False)  # from here on the server ends with the last program that uses it
