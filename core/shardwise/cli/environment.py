"""The doctor's checks of what shardwise stands on: Python, the machine, torch, its backends and devices."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from shardwise.cli.findings import FAILED, OK, WARNING, Finding
from shardwise.kernel.first_party import core_distribution
from shardwise.private_torch.parts import ALSO_RUN, TESTED_TORCH

__all__ = ["CHECKS"]

# A name that cannot be resolved may keep gloo busy for longer than a person waits.
_PATIENCE = 20.0
_GIB = 2**30


def _python() -> Iterator[Finding]:
    wanted = core_distribution().metadata["Requires-Python"] or ""
    have = platform.python_version()
    if SpecifierSet(wanted).contains(have, prereleases=True):
        yield Finding("python", OK, f"{platform.python_implementation()} {have}")
    else:
        yield Finding("python", FAILED, f"{have}, and shardwise needs {wanted}", "Use such a Python.")


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{platform.platform()}, {cores} CPU cores for this process"
    names = getattr(os, "sysconf_names", {})
    if {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= set(names):
        found += f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / _GIB:.1f} GiB of memory"
    yield Finding("machine", OK, found)


def _torch() -> Iterator[Finding]:
    oldest, newest = Version(TESTED_TORCH[0]), Version(ALSO_RUN[-1])
    have = Version(torch.__version__)
    tested = f"tested with {' to '.join(TESTED_TORCH)}, run once with {' and '.join(ALSO_RUN)}"
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "for CPU"
    if have.release[:2] < oldest.release:
        yield Finding("torch", FAILED, f"{have} {built}; {tested}", f'Run pip install "torch>={oldest}".')
    elif have.release[:2] > newest.release:
        do = "Look for a newer shardwise; torch's private parts may have changed."
        yield Finding("torch", WARNING, f"{have} {built}; {tested}", do)
    else:
        yield Finding("torch", OK, f"{have} {built}; {tested}")


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("backends", FAILED, "torch is built without torch.distributed", "Install another build of torch.")
        return
    have = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    shown = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in have.items())
    if torch.cuda.is_available() and not have["nccl"]:
        yield Finding("backends", WARNING, f"{shown}, with CUDA devices", "Install a build of torch with NCCL.")
    elif not have["gloo"]:
        do = "Install another build of torch: meshes of CPUs and the worker pool need gloo."
        yield Finding("backends", WARNING, shown, do)
    else:
        yield Finding("backends", OK, shown)


def _devices() -> Iterator[Finding]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
        yield Finding("devices", OK, f"{count} CUDA: {', '.join(names)}")
    elif torch.version.cuda:
        do = "Check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES, if there should be any."
        yield Finding("devices", WARNING, "torch is built for CUDA and finds no device", do)
    else:
        yield Finding("devices", OK, "CPU only")


def _gloo() -> Iterator[Finding]:
    if not (dist.is_available() and dist.is_gloo_available()):
        return
    if dist.is_initialized():
        yield Finding("process group", OK, f"one of {dist.get_world_size()} ranks is running already")
        return
    outcome: list[str] = []
    # A thread that hangs in C++ cannot be stopped, but as a daemon it does not keep the process.
    thread = threading.Thread(target=lambda: outcome.append(_one_rank()), daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    wrong = outcome[0] if outcome else f"it does not start within {_PATIENCE:.0f} s"
    if wrong:
        do = "Check that the host's own name resolves, and GLOO_SOCKET_IFNAME."
        yield Finding("process group", FAILED, f"gloo with one rank: {wrong}", do)
    else:
        yield Finding("process group", OK, "gloo starts with one rank and reduces")


def _one_rank() -> str:
    """What is wrong with a group of this process alone, or nothing."""
    try:
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=_PATIENCE)
        )
        try:
            ones = torch.ones(2)
            dist.all_reduce(ones)
            return "" if ones.tolist() == [1.0, 1.0] else f"it reduces ones to {ones.tolist()}"
        finally:
            dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001  whatever it raises is the finding
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "python": _python,
    "machine": _machine,
    "torch": _torch,
    "backends": _backends,
    "devices": _devices,
    "process group": _gloo,
}
