"""What importing a plugin does to a process, seen from outside: it may end it, hold it up, print, or start another.

One child imports all plugins in turn, as a program would, and tells of each. Where it ends or stays, that plugin is to
blame, and another child takes the rest. So all is seen in one pass when all is well.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

from attrs import field, frozen

from shardwise.discovery.entry_points import InstalledPlugin, discover
from shardwise.discovery.loading import load
from shardwise.kernel.registry import Registry
from shardwise.settings import Settings

__all__ = ["LIMIT", "Seen", "probe_plugins", "stdout_on_stderr"]

LIMIT = 30.0
"""Seconds that a plugin may take to import and to register its rules."""

_START = 120.0  # seconds that a new process may take to import torch

_SHOWN = 60  # letters of what a plugin prints


@frozen
class Seen:
    """``end`` says how the import ended the process or did not end itself; "" where it came back. ``notes`` are other
    things that a program would not expect.
    """

    end: str = ""
    notes: tuple[str, ...] = field(default=(), converter=tuple)
    stderr: str = ""


def probe_plugins(plugins: Sequence[InstalledPlugin], limit: float | None = None) -> list[Seen]:
    """Import the plugins in other processes, in this order. ``limit`` is in seconds, for each (default: ``LIMIT``)."""
    limit = LIMIT if limit is None else limit
    seen: list[Seen] = []
    # A fork needs no second import of torch. One of several threads may inherit a lock that nobody opens, so what it
    # says against a plugin is heard again in a process of its own.
    forked = hasattr(os, "fork")
    while len(seen) < len(plugins):
        rest = plugins[len(seen) :]
        found = _run(rest, limit, forked=forked)
        if forked and found[-1].end and threading.active_count() > 1:
            forked = False
            found = found[:-1]
        seen += found
    return seen


# -- the parent ------------------------------------------------------------------------------------------------------


def _run(plugins: Sequence[InstalledPlugin], limit: float, *, forked: bool) -> list[Seen]:
    """What one child says, up to the first plugin that ends it or does not come back."""
    reading, writing = os.pipe()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = (_fork if forked else _start)(plugins, writing, out, err)
        os.close(writing)
        try:
            seen, code = _listen(pid, reading, len(plugins), limit)
        finally:
            _end(pid)
            os.close(reading)
        if len(seen) == len(plugins):
            return seen
        err.seek(0)
        end = f"does not end within {limit:g} s" if code is None else _how(code)
        return [*seen, Seen(f"{end} at import", stderr=_shortened(err.read().decode(errors="replace")))]


def _listen(pid: int, reading: int, number: int, limit: float) -> tuple[list[Seen], int | None]:
    """The lines of a child, and its exit status; None if it took too long."""
    seen: list[Seen] = []
    text, deadline, status = b"", time.monotonic() + limit + _START, None
    with selectors.DefaultSelector() as selector:
        selector.register(reading, selectors.EVENT_READ)
        while len(seen) < number:
            # What a child of the child holds open never ends: so the child is asked for, too.
            ready = selector.select(0.05)
            data = os.read(reading, 1 << 16) if ready else b""
            if data:
                deadline = time.monotonic() + limit
                *lines, text = (text + data).split(b"\n")
                seen += [Seen(**json.loads(line)) for line in lines if line != b"ready"]
                continue
            if status is not None or ready:
                return seen, status if status is not None else os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            ended, code = os.waitpid(pid, os.WNOHANG)
            status = os.waitstatus_to_exitcode(code) if ended else None
            if time.monotonic() > deadline:
                return seen, None
    return seen, 0


def _end(pid: int) -> None:
    """End the child and all that it started, and forget it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _how(code: int) -> str:
    if code >= 0:
        return f"ends the process with exit code {code}"
    try:
        return f"crashes the process with signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"crashes the process with signal {-code}"


def _fork(plugins: Sequence[InstalledPlugin], writing: int, out: IO[bytes], err: IO[bytes]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for a fork of several threads
        pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        _import_all(plugins, writing, out)
    finally:
        os._exit(0)


def _start(plugins: Sequence[InstalledPlugin], writing: int, out: IO[bytes], err: IO[bytes]) -> int:
    names = [(p.origin.plugin, p.origin.distribution) for p in plugins]
    os.set_inheritable(writing, True)
    command = [sys.executable, "-c", _SCRIPT, json.dumps([names, writing]), json.dumps(sys.path)]
    child = subprocess.Popen(  # noqa: S603  # this Python, our own script and names of plugins
        command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, pass_fds=[writing], start_new_session=True
    )
    child.returncode = 0  # it is waited for by its number
    return child.pid


_SCRIPT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from shardwise.cli import plugin_probe
plugin_probe.main()
"""


# -- the child -------------------------------------------------------------------------------------------------------


def main() -> None:
    """Import the plugins that the command line names; what they write goes to a file of its own."""
    names, writing = json.loads(sys.argv[1])
    by_name = {(p.origin.plugin, p.origin.distribution): p for p in discover(Settings())}
    with os.fdopen(os.dup(1), "rb", closefd=True) as out:
        _import_all([by_name[name, dist] for name, dist in names], writing, out)
    os._exit(0)


def _import_all(plugins: Sequence[InstalledPlugin], writing: int, out: IO[bytes]) -> None:
    with suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected: it need not fill the disk
    notes: list[str] = []
    sys.addaudithook(lambda event, _: notes.append(event) if event in _PROCESSES else None)
    mine = os.getpid()
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    os.write(writing, b"ready\n")
    before = os.fstat(out.fileno()).st_size
    for plugin in plugins:
        notes.clear()
        threads, end, trace = threading.active_count(), "", ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                load([plugin], Registry(), strict=False, whole=True)
            except KeyboardInterrupt:  # nobody interrupts this process, and a program would end of it
                end, trace = "raises KeyboardInterrupt at import", traceback.format_exc()
            except Exception:  # noqa: BLE001, S110  # found again where it is loaded, with its traceback
                pass
        if os.getpid() != mine:  # a plugin has forked, and this is the other one
            os._exit(0)
        with suppress(Exception):
            sys.stdout.flush()
        printed = os.pread(out.fileno(), 1 << 12, before)
        before = os.fstat(out.fileno()).st_size
        told = [f"prints at import: {_first_line(printed)}"] if printed else []
        told += ["starts a process at import"] if notes else []
        told += ["starts a thread at import"] if threading.active_count() > threads else []
        os.write(writing, json.dumps({"end": end, "notes": told, "stderr": _shortened(trace)}).encode() + b"\n")


_PROCESSES = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec"})


def _first_line(printed: bytes) -> str:
    lines = printed.decode(errors="replace").strip().splitlines() or [""]
    text = lines[0][:_SHOWN] + ("..." if len(lines) > 1 or len(lines[0]) > _SHOWN else "")
    return repr(text)


# -- where it is imported after all ----------------------------------------------------------------------------------


def _shortened(text: str) -> str:
    """The beginning and the end of what a child wrote: the stack of a crash may be long, and comes after a message."""
    most = 4000
    return text if len(text) <= most else f"{text[: most // 2]}\n...\n{text[-most // 2 :]}"


@contextmanager
def stdout_on_stderr() -> Iterator[None]:
    """What plugins print goes to stderr, so that stdout has what the command prints and nothing else."""
    sys.stdout.flush()
    replaced: Any = sys.stdout
    kept = None
    with suppress(OSError, ValueError):
        kept = os.dup(1)
        os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        with suppress(Exception):
            sys.stdout.flush()
        sys.stdout = replaced
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
