"""What happens to files on their way: damage, haste and malice, each from a seed; and a watch on what reading does.

A test of another kind of file says what it reads and what may come of it::

    for seed in range(300):
        what, data = mutated(drawing(seed), GOOD, [OTHER])
        ...
"""

import json
import os
import random
import re
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

HUGE = (b"1152921504606846976", b"9" * 5000, b"-1", b"1e400", b"0", b"NaN", b'"' + b"A" * 70000 + b'"', b"4294967295")
OUTSIDE = ("../secret", "/etc/passwd", "..\\secret", "a/../../secret", "link", "a\0b", "x" * 5000, ".", "", "\ud800")
BINARY_HUGE = (b"\xff" * 8, b"\x00" * 7 + b"\x10", b"\xff\xff\xff\x7f", b"r\xff\xff\xff\xff", b"\x8a\xff", b"0")
PICKLED_CALL = b"\x80\x04cos\nsystem\n\x8c\x0etouch attacked\x85R."


def drawing(seed):
    return random.Random(seed)  # noqa: S311  # chance, no secret


def mutated(rng, data, others=()):
    """One mutation of a file's bytes: what it is, and the bytes."""
    what = rng.choice([name for name in MUTATIONS if others or name != "spliced"])
    return what, MUTATIONS[what](rng, data, others)


def _place(rng, data):
    return rng.randrange(len(data) + 1)


def _flipped(rng, data, _):
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8, 64))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def _overwritten(rng, data, _):
    at, n = _place(rng, data), rng.choice((1, 4, 8, 100))
    return data[:at] + rng.randbytes(n) + data[at + n :]


def _spliced(rng, data, others):
    other = rng.choice(others)
    return rng.choice((other, data[: _place(rng, data)] + other[_place(rng, other) :], data + other))


def _without(rng, data, _):
    lines = data.splitlines(keepends=True)
    if len(lines) > 3 and rng.random() < 0.7:
        at = rng.randrange(len(lines))
        return b"".join(lines[:at] + lines[at + rng.choice((1, 1, 3)) :])
    at = _place(rng, data)
    return data[:at] + data[at + rng.choice((1, 8, 300)) :]


def _doubled(rng, data, _):
    lines = data.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    return b"".join(lines[: at + 1] + lines[at : at + rng.choice((1, 1, 5))] + lines[at + 1 :])


def _another_number(rng, data, _):
    """A number of the text is huge, negative or none; in a binary file, eight bytes are."""
    numbers = list(re.finditer(rb"(?<![\w.])\d+(?![\w.])", data))
    if numbers and rng.random() < 0.8:
        number = rng.choice(numbers)
        return data[: number.start()] + rng.choice(HUGE) + data[number.end() :]
    at, value = _place(rng, data), rng.choice(BINARY_HUGE)
    return data[:at] + value + data[at + rng.choice((0, len(value))) :]


def _another_text(rng, data, _):
    """A text of the file leads out of the folder, is very long, or holds a NUL."""
    texts = list(re.finditer(rb'(?<=")[^"\n]{1,80}(?=")|__\d+_\d+\.distcp|[a-z_.]{5,}', data))
    if not texts:
        return _overwritten(rng, data, ())
    text, name = rng.choice(texts), rng.choice(OUTSIDE)
    new = json.dumps(name)[1:-1].encode() if data.isascii() else name.encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:  # of the same length, so that a binary file stays well-formed
        new = (new * 80)[: len(text[0])] if len(new) < len(text[0]) else new[: len(text[0])]
    return data[: text.start()] + new + data[text.end() :]


def _another_word(rng, data, _):
    """A line says true, null, a list or a table where it said something else; brackets nest."""
    value = rng.choice((b"true", b"null", b"[]", b"{}", b"[" * 100000, b'{"a":' * 50000, b'"R"', b"1.5", b'"\\ud800"'))
    values = list(re.finditer(rb"(?<=[:=] )[^\n,{}\[\]]+|(?<=\[)[^\n\[\]]*(?=\])", data))
    if not values:
        return data + value
    old = rng.choice(values)
    return data[: old.start()] + value + data[old.end() :]


def _later(rng, data, _):
    old = re.search(rb'("?(?:version|format)"?\s*[:=]\s*)(\d+)', data)
    later = rng.choice((b"2", b"99", b'"1"', b"1.0", b"true", b"-1", b"null"))
    return data[: old.start(2)] + later + data[old.end(2) :] if old else data[:1] + b"\x09" + data[2:]


MUTATIONS = {
    "bits flipped": _flipped,
    "cut short": lambda rng, data, _: data[: _place(rng, data)],
    "empty": lambda _rng, _data, _others: b"",
    "overwritten": _overwritten,
    "random bytes": lambda rng, data, _: rng.randbytes(rng.choice((1, 16, len(data)))),
    "zeros": lambda rng, data, _: data[: (at := _place(rng, data))] + bytes(len(data) - at),
    "more at the end": lambda rng, data, _: data + rng.choice((b"\0", b"\n", b"}", rng.randbytes(9))),
    "spliced": _spliced,
    "a part is gone": _without,
    "a line is there twice": _doubled,
    "another number": _another_number,
    "another name": _another_text,
    "another value": _another_word,
    "a later version": _later,
    "a pickle that calls": lambda _rng, _data, _others: PICKLED_CALL,
    "not UTF-8": lambda rng, data, _: data[: (at := _place(rng, data))] + b"\xff\xfe" + data[at:],
}


def misplaced(rng, path):
    """Something else lies where a file was: a folder, nothing, a pipe, a link out of the folder, one to itself."""
    data = path.read_bytes()
    what = rng.choice(("folder", "nothing", "pipe", "link out", "link to itself"))
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "link to itself":
        path.symlink_to(path.name)
    elif what == "link out":
        elsewhere = path.parent.parent / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        (elsewhere / path.name).write_bytes(data)
        path.symlink_to(elsewhere / path.name)
    return what


# -- what reading does ---------------------------------------------------------------------------------------------

_RUN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "pickle.find_class")
_CHANGE = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.link", "os.symlink", "shutil.rmtree")
_watch = threading.local()


def _hook(event, args):
    folder = getattr(_watch, "folder", None)
    if folder is None:
        return
    if event.startswith(_RUN) or event in _CHANGE:
        _watch.seen.append(f"{event} {args!r:.200}")
    elif event == "open" and isinstance(args[0], (str, bytes)):
        path = os.path.realpath(os.fsdecode(args[0]))
        is_read = not isinstance(args[1], str) or not set(args[1]) & set("wax+")
        inside = path == folder or path.startswith(folder + os.sep)
        own = path.startswith(_OWN) and not any(path.startswith(part) for part in _watch.forbidden)
        if not (is_read and (inside or own)):
            _watch.seen.append(f"open {path} {args[1]}")


# What any program reads: modules of Python and of what is installed, and the system's figures.
_OWN = tuple({*map(os.path.realpath, [sys.prefix, sys.base_prefix, *filter(None, sys.path)]), "/proc", "/sys", "/dev"})
_installed = []


@contextmanager
def watched(folder, seconds=20.0):
    """Within it only files of the folder are read, nothing is written or run, and it takes few seconds of CPU."""
    if not _installed:
        sys.addaudithook(_hook)  # there is no way to remove one
        _installed.append(True)
    _watch.forbidden, _watch.seen = ("/etc",), []
    _watch.folder, begin = os.path.realpath(Path(folder)), time.process_time()
    try:
        yield
    finally:
        _watch.folder = None
    assert not _watch.seen, _watch.seen
    assert time.process_time() - begin < seconds
