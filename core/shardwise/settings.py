"""Settings: environment variables first, then ``[tool.shardwise]`` of the nearest pyproject.toml.

========================== =================== ================================================================
environment                pyproject           meaning
========================== =================== ================================================================
SHARDWISE_PLUGINS          plugins             the only plugins to load (unset: all, empty: none)
SHARDWISE_DISABLE_PLUGINS  disable-plugins     plugins that are never imported
SHARDWISE_AUTOLOAD         autoload            off: only the plugins that ``plugins`` names are loaded
SHARDWISE_STRICT           strict              on: any problem with a plugin raises when plugins are loaded
SHARDWISE_PREFER           prefer              which plugin wins, by op (``aten.mm.default``, ``aten.mm``, ``*mm*``)
SHARDWISE_UNKNOWN_OPS      unknown-ops         ``refuse`` (unset), or ``replicate``: ops without a rule run on whole
                                               tensors on every rank
SHARDWISE_RANDOM           random              how random ops draw: ``counter``, ``torch`` or ``local`` (unset: torch
                                               until ``shardwise.manual_seed`` is called, counter from then on)
SHARDWISE_PLAIN            plain               plain tensors among operands: ``compare`` (unset), ``replicate`` or
                                               ``refuse``
SHARDWISE_CHECK_RANKS      check-ranks         on: ranks compare each collective before it, plain tensors at
                                               every use, and whether they keep the same moved operands
SHARDWISE_WAIT_LIMIT       wait-limit          seconds that a collective may wait for other ranks (unset: 540), or
                                               ``off``
SHARDWISE_CHECK_REPLICAS   check-replicas      compare replicated parameters and optimizer states every so many
                                               optimizer steps (unset: 0, never)
SHARDWISE_VERIFY           verify              the share of calls, as in 0.001, that are run again on whole tensors and
                                               compared (unset: 0)
SHARDWISE_KEEP_MOVED       keep-moved          the most bytes of operands that a rank keeps after it moved them for an
                                               op, for the next op that needs them so (unset: 256MiB; 0: none)
SHARDWISE_COMMUNICATION    communication       what becomes of implicit communication, as in ``forbid over tp above
                                               1MiB``: see ``shardwise.communication`` (unset: it is allowed)
SHARDWISE_LEARN            learn               ``auto`` (unset): programs are learned from their first
                                               ``distribute_module`` on where that is safe and worth it; ``on``: as if
                                               they called ``shardwise.learn`` there; ``off``: only where they call it
SHARDWISE_LOCK             lock                the only rules to load: a file that ``shardwise plugins freeze`` wrote; a
                                               path in a pyproject.toml starts at its folder
========================== =================== ================================================================

:data:`VARIABLES` has these and the variables that are no settings. Any other one that starts with ``SHARDWISE_`` is an
error: a setting with a slip in its name would do nothing, in silence.

Plugins are named by their entry point or by their distribution. Lists and ``op=plugin`` pairs of the environment are
separated by commas.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

from attrs import field, frozen

from shardwise.errors import SettingsError, warn_user

__all__ = [
    "PLAIN_POLICIES",
    "PREFIX",
    "RANDOM_MODES",
    "VARIABLES",
    "Settings",
    "normalised",
    "preferred",
    "read_settings",
]

PREFIX = "SHARDWISE_"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
RANDOM_MODES = ("counter", "torch", "local")
PLAIN_POLICIES = ("compare", "replicate", "refuse")


def normalised(name: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@frozen
class Settings:
    """All settings, and the source of each one that is set. ``plugins`` is None when no allow-list is set."""

    plugins: frozenset[str] | None = None
    disabled: frozenset[str] = frozenset()
    autoload: bool = True
    strict: bool = False
    prefer: tuple[tuple[str, str], ...] = ()
    unknown_ops: str = "refuse"
    random: str | None = None
    plain: str = "compare"
    check_ranks: bool = False
    wait_limit: float = 540.0  # a minute less than what NCCL waits, so that this error is the one that is read
    check_replicas: int = 0
    verify: float = 0.0
    keep_moved: int = 256 << 20
    communication: tuple[str, ...] = ()
    learn: bool | None = None  # None: automatically
    lock: str | None = None
    sources: Mapping[str, str] = field(factory=dict)
    # for each pyproject.toml that may have settings and cannot be read: what is wrong, and what to do
    unread: tuple[tuple[str, str], ...] = field(default=(), eq=False)

    def source(self, name: str) -> str:
        """The source of a setting, for a message: the environment variable, or the key and the file."""
        return self.sources.get(name, f"the setting {name!r}")


def preferred(prefer: Sequence[tuple[str, str]], op: str) -> tuple[str, str] | None:
    """The pair of the ``prefer`` setting that holds for an op's full name (``aten.mm.default``).

    The full name goes before the name without overload, and that before a pattern. A longer pattern goes before a
    shorter one.
    """
    packet = op.rpartition(".")[0]
    # A name without a wildcard is not a pattern: it means that op alone.
    matching = [
        pair
        for pair in prefer
        if pair[0] in (op, packet) or (any(c in pair[0] for c in "*?[") and fnmatchcase(op, pair[0]))
    ]
    return min(matching, key=lambda p: (p[0] != op, p[0] != packet, -len(p[0]), p[0]), default=None)


# -- reading -----------------------------------------------------------------------------------------------------


def read_settings(environ: Mapping[str, str] | None = None, folder: Path | None = None) -> Settings:
    """The settings in force in ``folder`` (default: the current one).

    Raises :class:`SettingsError` for a value that cannot be read, and for a key or a variable that does not exist.
    """
    environ = os.environ if environ is None else environ
    for variable in environ:
        if variable.startswith(PREFIX) and variable not in VARIABLES:
            shown = [name for name in VARIABLES if name not in _OF_TESTS]
            do = _nearest(variable, shown, f"Correct or unset it. There are {', '.join(shown)}.")
            raise _refusal(variable, f"there is no variable {variable!r}", do)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    path, table, unread = _pyproject(folder)
    _warn_of(unread)
    for key, value in table.items():
        name = key.replace("_", "-")
        if name not in _KEYS:
            do = _nearest(name, _KEYS, f"It has {', '.join(_KEYS)}.")
            raise _refusal(f"[tool.shardwise] of {path}", f"there is no setting {key!r}", do)
        attribute, parse_value, _ = _KEYS[name]
        if attribute in values:
            raise _refusal(f"[tool.shardwise] of {path}", f"{name!r} is set twice, by - and by _", "Keep one of them.")
        where = f"{key!r} in [tool.shardwise] of {path}"
        values[attribute], sources[attribute] = _read(parse_value, where, value), where
        if attribute == "lock" and path is not None:
            values[attribute] = str(path.parent / values[attribute])
    for attribute, parse_value, variable in _KEYS.values():
        text = environ.get(variable)
        if text is not None:
            values[attribute], sources[attribute] = _read(parse_value, variable, text), variable
    return Settings(**values, sources=sources, unread=unread)


def _pyproject(folder: Path | None) -> tuple[Path | None, Mapping[str, Any], tuple[tuple[str, str], ...]]:
    """The nearest pyproject.toml with a table for shardwise, from ``folder`` (default: the current one) upwards, and
    what is wrong with each one on the way that cannot be read.
    """
    try:
        folder = Path.cwd() if folder is None else folder
    except OSError as error:
        return None, {}, (_unread("the current folder", error, "Change to a folder that exists."),)
    unread = []
    for path in (parent / "pyproject.toml" for parent in (folder, *folder.parents)):
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except OSError as error:
            unread.append(_unread(str(path), error, "Make it readable if it has a table [tool.shardwise]."))
            continue
        try:
            table = _table(content.decode())
        except ValueError as error:
            if _HAS_TABLE.search(content):
                raise _refusal(str(path), str(error), "Correct the file.") from error
            # A broken file in a folder above belongs to another project, unless it speaks of shardwise.
            if b"shardwise" in content:
                unread.append(_unread(str(path), error, "Correct it if it has settings of shardwise."))
            continue
        if table is not None:
            if table is _MISPLACED:
                raise _refusal(str(path), "its table is [shardwise], which nobody reads", "Write [tool.shardwise].")
            if not isinstance(table, dict):
                raise _refusal(str(path), "tool.shardwise is not a table", "Write [tool.shardwise] and keys under it.")
            return path, table, tuple(unread)
    return None, {}, tuple(unread)


def _unread(where: str, error: Exception, do: str) -> tuple[str, str]:
    return f"{where} cannot be read: {error}", do


_warned: set[tuple[str, str]] = set()


def _warn_of(unread: Iterable[tuple[str, str]]) -> None:
    """Warn of each once: a process reads its settings some ten times."""
    for found, do in unread:
        if (found, do) not in _warned:
            _warned.add((found, do))
            warn_user(f"{found}; shardwise has no settings of it. {do}", RuntimeWarning)


_MISPLACED = object()
"""What stands for a table [shardwise] outside of [tool]."""

_HAS_TABLE = re.compile(rb"""\[\s*["']?tool["']?\s*\.\s*["']?shardwise""")


@lru_cache(maxsize=8)
def _table(text: str) -> Any:
    """What a pyproject.toml has for shardwise; None without. A process asks some ten times, and parsing takes long."""
    if "shardwise" not in text:
        return None
    import tomllib  # only here: `import shardwise` reads no file

    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    tool = content.get("tool")
    table = tool.get("shardwise") if isinstance(tool, dict) else None
    return _MISPLACED if table is None and isinstance(content.get("shardwise"), dict) else table


def _read(parse_value: Callable[[str, Any], Any], where: str, value: Any) -> Any:
    """The value of a setting. Python reads numbers in hexadecimal that it can neither compute with nor print."""
    try:
        return parse_value(where, value)
    except (OverflowError, ValueError) as error:
        raise _refusal(where, "it has a number of hundreds of digits", "Write a smaller one.") from error


def _names(where: str, value: Any) -> frozenset[str]:
    words = value.split(",") if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise _refusal(where, f"{value!r} is not a list of names", 'Write a list, as in ["acme-kernels"].')
    return frozenset(normalised(word.strip()) for word in words if word.strip())


def _flag(where: str, value: Any) -> bool:
    word = value.strip().lower() if isinstance(value, str) else value
    if word is True or (isinstance(word, str) and word in _TRUE):
        return True
    if word is False or (isinstance(word, str) and word in _FALSE):
        return False
    raise _refusal(where, f"{value!r} is neither on nor off", "Write 1, true, yes or on; or 0, false, no or off.")


def _flag_or_auto(where: str, value: Any) -> bool | None:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return None
    try:
        return _flag(where, value)
    except SettingsError as error:
        raise _refusal(where, f"{value!r} is none of on, off and auto", "Write on, off or auto.") from error


def _bytes(where: str, value: Any) -> int:
    parts = re.fullmatch(r"\s*(\d+)\s*([KMG]iB|B)?\s*", value) if isinstance(value, str) else None
    if parts is not None:
        return int(parts[1]) << {"KiB": 10, "MiB": 20, "GiB": 30}.get(parts[2], 0)
    if type(value) is int and 0 <= value < 1 << 63:
        return value
    raise _refusal(where, f"{value!r} is not a number of bytes", "Write a whole number, or one with KiB, MiB or GiB.")


def _texts(where: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _refusal(where, f"{value!r} is neither a text nor a list of texts", 'Write one, as in "forbid over tp".')
    return tuple(texts)


def _seconds(where: str, value: Any) -> float:
    if value is False or (isinstance(value, str) and value.strip().lower() in _FALSE - {"0"}):
        return inf
    seconds = _number(value)
    if seconds is None or not 0 < seconds < inf:
        raise _refusal(where, f"{value!r} is not a number of seconds", "Write a number above 0, or off.")
    return seconds


def _share(where: str, value: Any) -> float:
    share = _number(value)
    if share is None or not 0 <= share <= 1:
        raise _refusal(where, f"{value!r} is not a share of calls", "Write a number from 0 to 1, as in 0.001.")
    return share


def _count(where: str, value: Any) -> int:
    count = _number(value)
    if count is None or count < 0 or count != int(count):
        raise _refusal(where, f"{value!r} is not a number of steps", "Write a whole number; 0 means never.")
    return int(count)


def _number(value: Any) -> float | None:
    """A number, also one that is written as text; None for anything else."""
    try:
        number = float(value) if isinstance(value, (str, int, float)) and not isinstance(value, bool) else nan
    except ValueError:
        return None
    return number if isfinite(number) else None


def _unknown_ops(where: str, value: Any) -> str:
    word = value.strip().lower() if isinstance(value, str) else value
    if word in ("refuse", "replicate"):
        return word
    raise _refusal(where, f"{value!r} does not say what becomes of ops without a rule", "Write refuse or replicate.")


def _random_mode(where: str, value: Any) -> str:
    word = value.strip().lower() if isinstance(value, str) else value
    if word not in RANDOM_MODES:
        raise _refusal(where, f"{value!r} is not a mode of drawing random numbers", f"Write {', '.join(RANDOM_MODES)}.")
    return str(word)


def _plain_policy(where: str, value: Any) -> str:
    word = value.strip().lower() if isinstance(value, str) else value
    if word not in PLAIN_POLICIES:
        raise _refusal(
            where, f"{value!r} does not say what becomes of plain tensors", f"Write {', '.join(PLAIN_POLICIES)}."
        )
    return str(word)


def _pairs(where: str, value: Any) -> tuple[tuple[str, str], ...]:
    pairs = value
    if isinstance(value, str):
        pairs = {}
        for word in filter(str.strip, value.split(",")):
            op, equals, plugin = word.partition("=")
            if not (equals and op.strip() and plugin.strip()):
                raise _refusal(
                    where, f"{word!r} is not a pair", "Write pairs, as in aten.mm=acme-kernels,aten.add.Tensor=other."
                )
            if op.strip() in pairs:
                raise _refusal(where, f"it names two plugins for {op.strip()!r}", "Keep the one that should hold.")
            pairs[op.strip()] = plugin
    if not isinstance(pairs, dict) or not all(isinstance(v, str) and v.strip() and k.strip() for k, v in pairs.items()):
        raise _refusal(
            where, f"{value!r} does not map ops to plugins", 'Write a table, as in {"aten.mm" = "acme-kernels"}.'
        )
    return tuple(sorted((op.strip().replace("::", "."), normalised(plugin.strip())) for op, plugin in pairs.items()))


def _file(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _refusal(where, f"{value!r} does not name a file", "Write its path, or leave the setting out.")
    return value


def _nearest(name: str, known: Iterable[str], otherwise: str) -> str:
    from difflib import get_close_matches  # only here: what is well needs none

    # Without what all begin with, which makes any two alike; and by first words too, as a name that is half written.
    whole = {one.removeprefix(PREFIX): one for one in known}
    starts = {rest[: at.start()]: one for rest, one in reversed(whole.items()) for at in re.finditer("[-_]", rest)}
    by_text = {**starts, **whole}
    near = get_close_matches(name.removeprefix(PREFIX), by_text, n=1)
    return f"The nearest is {by_text[near[0]]}. {otherwise}" if near else otherwise


def _refusal(where: str, found: str, do: str) -> SettingsError:
    return SettingsError(asked=f"read {where}", found=found, do=do, setting=where)


# key in pyproject -> attribute, reader, environment variable
_KEYS: dict[str, tuple[str, Callable[[str, Any], Any], str]] = {
    "plugins": ("plugins", _names, "SHARDWISE_PLUGINS"),
    "disable-plugins": ("disabled", _names, "SHARDWISE_DISABLE_PLUGINS"),
    "autoload": ("autoload", _flag, "SHARDWISE_AUTOLOAD"),
    "strict": ("strict", _flag, "SHARDWISE_STRICT"),
    "prefer": ("prefer", _pairs, "SHARDWISE_PREFER"),
    "unknown-ops": ("unknown_ops", _unknown_ops, "SHARDWISE_UNKNOWN_OPS"),
    "random": ("random", _random_mode, "SHARDWISE_RANDOM"),
    "plain": ("plain", _plain_policy, "SHARDWISE_PLAIN"),
    "check-ranks": ("check_ranks", _flag, "SHARDWISE_CHECK_RANKS"),
    "wait-limit": ("wait_limit", _seconds, "SHARDWISE_WAIT_LIMIT"),
    "check-replicas": ("check_replicas", _count, "SHARDWISE_CHECK_REPLICAS"),
    "verify": ("verify", _share, "SHARDWISE_VERIFY"),
    "keep-moved": ("keep_moved", _bytes, "SHARDWISE_KEEP_MOVED"),
    "communication": ("communication", _texts, "SHARDWISE_COMMUNICATION"),
    "learn": ("learn", _flag_or_auto, "SHARDWISE_LEARN"),
    "lock": ("lock", _file, "SHARDWISE_LOCK"),
}

# variable that is no setting -> where it is read
_OTHERS: dict[str, str] = {
    "SHARDWISE_LINKS": "shardwise.planning.link_file: the file of link figures, off for none",
    "SHARDWISE_CHECK_STRIDES": "shardwise.engine.first_run: every local tensor is compared with its spec",
}

# variable that only the tests of shardwise read -> where; no message names it
_OF_TESTS: dict[str, str] = {
    "SHARDWISE_PROGRAM_SLICES": "tests/programs/test_programs.py: in how many slices the random programs are drawn",
}

VARIABLES: dict[str, str] = {
    **{variable: "shardwise.settings" for _, _, variable in _KEYS.values()},
    **_OTHERS,
    **_OF_TESTS,
}
"""All environment variables that start with ``SHARDWISE_``, and where each is read."""
