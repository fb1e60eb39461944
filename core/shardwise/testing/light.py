"""Measure what a plugin's module imports, in a fresh process that has already imported torch and the rule API."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

from shardwise.errors import PluginLoadError

__all__ = ["Imported", "heavy_imports", "probe"]

# Modules of torch that cost more to import than all of a plugin should.
_HEAVY_TORCH = ("torch._dynamo", "torch._inductor", "torch.onnx", "torch.testing", "torch.utils.tensorboard")
_TIMEOUT = 120

# A separate process, because modules that this one has imported would hide what a plugin imports. The script also calls
# the hook, as the first look-up of a rule does.
_SCRIPT = """
import json, sys
request = json.loads(sys.argv[1])
sys.path[:] = request["path"]
import importlib, time, traceback
import torch, shardwise.rule, shardwise.hookspecs
from shardwise.testing.subject import subject_of
answers = {}
for name in request["modules"]:
    before, start = set(sys.modules), time.perf_counter()
    answer = answers[name] = {"traceback": ""}
    try:
        step = "error"
        module = importlib.import_module(name)
        answer["file"] = module.__file__ or ""
        step = "hook_error"
        subject_of(module)
    except BaseException as error:
        answer |= {step: f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    answer["seconds"] = time.perf_counter() - start
    answer["modules"] = sorted(set(sys.modules) - before)
print("\\n" + json.dumps(answers))
"""


@frozen
class Imported:
    """What importing a plugin's module and calling its hook did.

    ``file`` is the module's file, and ``seconds`` the time of both. ``pulled`` are the packages that were imported
    besides the standard library, torch, shardwise and the module's own package, and heavy parts of torch. ``error``
    says why the module cannot be imported, ``hook_error`` why its hook cannot be called.
    """

    file: str = ""
    seconds: float = 0.0
    pulled: tuple[str, ...] = ()
    error: str = ""
    hook_error: str = ""
    traceback: str = ""


def probe(modules: Sequence[str], roots: Sequence[Path] = ()) -> dict[str, Imported]:
    """Import modules one after the other in a process that has torch and the rule API; say what each one imported.

    The process searches ``roots`` first, then this process's path. If it dies or does not answer, every module has that
    error.
    """
    request = json.dumps({"path": [*map(str, roots), *sys.path], "modules": list(modules)})
    try:
        done = subprocess.run(  # noqa: S603  this Python, our own script and names of modules
            [sys.executable, "-c", _SCRIPT, request], capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
        answers = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return dict.fromkeys(modules, Imported(error=f"importing it takes more than {_TIMEOUT} s"))
    except ValueError:
        last = done.stderr.strip().rpartition("\n")[2]
        error = f"importing it ends the process with {done.returncode} {last}".rstrip()
        return dict.fromkeys(modules, Imported(error=error, traceback=done.stderr))
    imported: dict[str, Imported] = {}
    for name, answer in answers.items():
        own = name.partition(".")[0]
        pulled: list[str] = []
        for module in answer.pop("modules"):
            top = module.partition(".")[0]
            heavy = next((h for h in _HEAVY_TORCH if f"{module}.".startswith(f"{h}.")), None)
            if heavy is not None:
                pulled.append(heavy)
            elif top not in (own, "torch", "shardwise", *sys.stdlib_module_names) and not top.startswith("_"):
                pulled.append(top)
        imported[name] = Imported(pulled=tuple(dict.fromkeys(pulled)), **answer)
    return imported


def heavy_imports(module: str, *, allowed: Sequence[str] = ()) -> list[str]:
    """What a plugin's module and its hook import, except what is always allowed and ``allowed`` packages.

    Raises :class:`PluginLoadError` when the module cannot be imported in a fresh process or its hook cannot be called,
    with the traceback.
    """
    imported = probe([module])[module]
    if imported.error or imported.hook_error:
        raise PluginLoadError(
            asked=f"import {module} in a fresh process",
            found=imported.error or imported.hook_error,
            do=f"Correct what the traceback shows:\n{imported.traceback}",
            plugin=module,
        )
    return [name for name in imported.pulled if name not in allowed]
