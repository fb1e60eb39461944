"""What a plugin's module pulls in: seen from a fresh process that has torch and the authoring surface already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import PluginLoadError

__all__ = ["heavy_imports"]

_TIMEOUT = 300.0
# The module is imported and its hook called, as at the first look-up of a rule.
_SCRIPT = """
import importlib, json, sys
import torch, shardwise.rule, shardwise.hookspecs, shardwise.testing.subject
before = set(sys.modules)
shardwise.testing.subject.subject_of(importlib.import_module(sys.argv[1]))
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""


def heavy_imports(module: str, *, allowed: Sequence[str] = ()) -> list[str]:
    """Top-level packages that importing a plugin's module and calling its hook bring in, beyond what may be.

    The standard library, shardwise, the module's own package and ``allowed`` ones may be, and whatever torch has
    imported itself. Raises :class:`PluginLoadError` when the module cannot be imported in a fresh process, with its
    traceback.
    """
    # The search path of this process, so that what it can import the other one can, too.
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    done = subprocess.run(  # noqa: S603  our own script and a module's name
        [sys.executable, "-c", _SCRIPT, module],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise PluginLoadError(
            asked=f"import {module} in a fresh process",
            found=(done.stderr.strip().splitlines() or ["it ended without a message"])[-1],
            do=f"Mend what the traceback shows:\n{done.stderr}",
            plugin=module,
        )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    known = {*sys.stdlib_module_names, "shardwise", module.partition(".")[0], *allowed}
    return [name for name in found if name not in known]
