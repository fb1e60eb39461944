"""Importing a plugin that is to be checked: from where it lies, and what that pulls in."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

__all__ = ["Imported", "imported_from", "probe"]

# Modules of torch that cost more to import than all of a plugin should.
_HEAVY_TORCH = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.testing", "torch.utils.tensorboard")
_TIMEOUT = 120

# A process of its own: what this one imported already would hide what a plugin imports.
_PROBE = """
import json, sys
request = json.loads(sys.argv[1])
sys.path[:] = request["path"]
import importlib, time, traceback
import torch, shardwise.rule, shardwise.hookspecs
answers = {}
for name in request["modules"]:
    before, start = set(sys.modules), time.perf_counter()
    try:
        module = importlib.import_module(name)
    except BaseException as error:
        answers[name] = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        continue
    seconds = time.perf_counter() - start
    answers[name] = {"seconds": seconds, "file": module.__file__, "pulled": sorted(set(sys.modules) - before)}
print("\\n" + json.dumps(answers))
"""


@frozen
class Imported:
    """What importing a module did: the file it came from, seconds, the other packages that came along; or the error."""

    file: str = ""
    seconds: float = 0.0
    pulled: tuple[str, ...] = ()
    error: str = ""


@contextmanager
def imported_from(roots: Sequence[Path], packages: Sequence[str]) -> Iterator[None]:
    """Import these top-level packages from ``roots`` for a while, whatever of that name was imported before."""
    path, before = list(sys.path), dict(sys.modules)
    _forget(packages)
    sys.path[:0] = map(str, roots)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        if roots:
            _forget(packages)
            _restore(before, packages)


def _forget(packages: Sequence[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


def _restore(before: dict[str, Any], packages: Sequence[str]) -> None:
    sys.modules.update({name: module for name, module in before.items() if name.partition(".")[0] in packages})


def probe(modules: Sequence[str], roots: Sequence[Path]) -> dict[str, Imported]:
    """Import modules one after the other in a process that has torch and the authoring surface; tell what came along.

    A process that dies or does not answer is the error of all of them.
    """
    request = json.dumps({"path": [*map(str, roots), *sys.path], "modules": list(modules)})
    try:
        done = subprocess.run(  # noqa: S603  this Python, and a plugin that its author asks to check
            [sys.executable, "-c", _PROBE, request], capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
        answers = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return dict.fromkeys(modules, Imported(error=f"importing it takes more than {_TIMEOUT} s"))
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        return dict.fromkeys(modules, Imported(error=f"importing it ends the process with {done.returncode} {last}"))
    return {name: _imported(name, answer) for name, answer in answers.items()}


def _imported(name: str, answer: dict[str, Any]) -> Imported:
    if "error" in answer:
        return Imported(error=answer["error"])
    own = name.partition(".")[0]
    pulled: list[str] = []
    for module in answer["pulled"]:
        top = module.partition(".")[0]
        heavy = next((h for h in _HEAVY_TORCH if f"{module}.".startswith(f"{h}.")), None)
        if heavy is not None:
            pulled.append(heavy)
        elif top not in (own, "torch", "shardwise") and top not in sys.stdlib_module_names and not top.startswith("_"):
            pulled.append(top)
    return Imported(answer["file"] or "", answer["seconds"], tuple(dict.fromkeys(pulled)))
