"""The doctor's checks of shardwise itself: copies, settings, link figures, plugins, dependencies, rule conflicts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution, distributions
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

import shardwise
from shardwise.cli.findings import FAILED, OK, WARNING, Finding
from shardwise.cli.plugin_states import plugin_states
from shardwise.cli.subject import editable_folder
from shardwise.comm.policy_text import parse_policies
from shardwise.discovery.entry_points import GROUP, discover
from shardwise.errors import LinksError, LockError, SettingsError
from shardwise.kernel.first_party import CORE, PROJECT, core_distribution, core_version
from shardwise.kernel.foreign_files import read_text
from shardwise.kernel.plurals import counted
from shardwise.kernel.precedence import prefer_settings
from shardwise.kernel.signature import op_name
from shardwise.planning.link_file import MOST, chosen_file, parse
from shardwise.settings import Settings, normalised, preferred, read_settings

__all__ = ["CHECKS"]


# -- copies ----------------------------------------------------------------------------------------------------------


def _copies() -> Iterator[Finding]:
    here = Path(shardwise.__file__).resolve().parent
    yield Finding("shardwise", OK, f"{core_version()}, imported from {here}")
    for place in dict.fromkeys(Path(entry or ".").resolve() for entry in sys.path):
        if (place / "core" / "shardwise" / "__init__.py").is_file():
            do = "Leave the folder out of sys.path; with pytest use --import-mode=importlib."
            found = f"{place} is on sys.path: core.shardwise would be a second copy with a registry of its own"
            yield Finding("shardwise", WARNING, found, do)
        other = place / PROJECT
        if (other / "__init__.py").is_file() and other != here:
            yield Finding("shardwise", WARNING, f"a second copy is in {place}, not used", "Uninstall one of the two.")
    named = [(normalised(d.metadata["Name"] or ""), d) for d in distributions()]
    whole = [d for name, d in named if name == PROJECT and any(e.group == GROUP for e in d.entry_points)]
    cores = [d for name, d in named if name == CORE]
    if whole and cores:
        found = f"{PROJECT} {whole[0].version} has everything, and {CORE} {cores[0].version} is installed beside it"
        do = f"Uninstall both, then install a checkout, or {PROJECT} from an index, whose parts are distributions."
        yield Finding("shardwise", FAILED, found, do)
    dists = whole + cores
    places = dict.fromkeys((editable_folder(dist) or Path(str(dist.locate_file("")))).resolve() for dist in dists)
    if len(places) > 1:
        fault = f"metadata of {counted(len(places), 'copy')}: {', '.join(map(str, places))}"
        yield Finding("shardwise", WARNING, fault, "Uninstall all and install once.")
    home = next(iter(places), None)
    if home is not None and not here.is_relative_to(home):
        fault = f"the metadata is of {home}: plugins are found by its entry points"
        yield Finding("shardwise", WARNING, fault, "Install the copy that is imported, or leave it out of PYTHONPATH.")


# -- settings, link figures ------------------------------------------------------------------------------------------


def _settings() -> Iterator[Finding]:
    do = "Correct it there."
    try:
        settings = read_settings()
    except SettingsError as error:
        yield Finding("settings", FAILED, f"{error.asked}: {error.found}", error.do)
        return
    for unread, what_to_do in settings.unread:
        yield Finding("settings", WARNING, unread, what_to_do)
    for name, where in settings.sources.items():
        yield Finding("settings", OK, f"{name} = {_setting_text(getattr(settings, name))}, from {where}")
    if not settings.sources:
        yield Finding("settings", OK, "none are set")
    often = "at every use" if settings.check_ranks else "when they are new or were written"
    meaning = {"compare": f"ranks compare them {often}", "replicate": "believed to be the same", "refuse": "an error"}
    yield Finding("plain tensors", OK, f"{settings.plain}: {meaning[settings.plain]}")
    for check in (discover, lambda settings: parse_policies(settings.communication, settings.source("communication"))):
        try:
            check(settings)
        except SettingsError as error:
            yield Finding("settings", FAILED, f"{error.asked}: {error.found}", f"{do} {error.do}")


def _setting_text(value: object) -> str:
    if isinstance(value, (frozenset, tuple)):
        words = sorted(value) if isinstance(value, frozenset) else value
        return ", ".join(" = ".join(word) if isinstance(word, tuple) else str(word) for word in words) or "none"
    return "on" if value is True else "off" if value is False else str(value)


def _links() -> Iterator[Finding]:
    path, named = chosen_file()
    if path is None:
        yield Finding("link figures", OK, "off: moves are costed by the defaults")
        return
    try:
        text = read_text(path, MOST)
    except FileNotFoundError:
        if named:
            yield Finding("link figures", FAILED, f"SHARDWISE_LINKS names {path}, which does not exist", _CALIBRATE)
        else:
            yield Finding("link figures", OK, f"none measured (no {path}): moves are costed by the defaults")
        return
    except (OSError, ValueError) as error:
        yield Finding("link figures", FAILED, f"{path} cannot be read: {error}", _CALIBRATE)
        return
    try:
        measured = parse(text, str(path))
    except LinksError as error:
        yield Finding("link figures", FAILED, f"{error.asked}: {error.found}", error.do)
        return
    yield Finding("link figures", OK, f"{path}: {'; '.join(str(one.site) for one in measured) or 'no mesh'}")


_CALIBRATE = "Write it with `shardwise calibrate`, or set SHARDWISE_LINKS=off."


# -- plugins ---------------------------------------------------------------------------------------------------------

_ADVICE = {
    "failed": "`shardwise plugins show {0}` has the traceback; SHARDWISE_DISABLE_PLUGINS={0} leaves it out.",
    "refused": "Install a version that fits, or uninstall it.",
    "needs upgrade": "Upgrade it, or uninstall it.",
}


_AT_IMPORT = "A module of rules should define them and do nothing else: tell its authors."
_NOTHING = "Its hook should pass rules to registry.add(...): tell its authors."


def _plugins() -> Iterator[Finding]:
    states = plugin_states()
    for status in states.statuses:
        name, shown = f"plugin {status.plugin.origin.plugin}", str(status.plugin.origin)
        if isinstance(states.refusal, LockError) and status.reason == states.refusal.found:
            continue  # the look-up says so once, and what to do
        if status.status in _ADVICE:
            do = _ADVICE[status.status].format(status.plugin.origin.plugin)
            yield Finding(name, FAILED, f"{shown} {status.status}: {status.reason}", do)
        elif status.status == "loaded" and status.reason:
            do = _NOTHING if status.reason == "registers nothing" else _AT_IMPORT
            yield Finding(name, WARNING, f"{shown} loaded, {counted(status.ops, 'op')}; it {status.reason}", do)
        elif status.status == "loaded":
            yield Finding(name, OK, f"{shown} loaded, {counted(status.ops, 'op')}")
        else:
            yield Finding(name, OK, f"{shown} {status.status}: {status.reason}")
        for copy in status.plugin.hides:
            yield Finding(name, WARNING, f"{copy} is hidden by {status.plugin.location}", "Uninstall one of the two.")
    if not states.statuses:
        yield Finding("plugins", FAILED, "no plugin is installed, so no op has a rule", "Reinstall shardwise.")
    if states.refusal is not None:
        error = states.refusal
        yield Finding("look-up", FAILED, f"programs cannot look up rules: {error.asked}: {error.found}", error.do)
    else:
        yield Finding("look-up", OK, f"{len({entry.op for entry in states.registry.ops()})} ops have rules")


def _preferences() -> Iterator[Finding]:
    """Preferences that decide nothing: no op with a rule has the name."""
    try:
        settings = read_settings()
    except SettingsError:
        return
    ops = {op_name(entry.op) for entry in plugin_states().registry.ops()}
    for pair in settings.prefer:
        if not any(preferred([pair], op) for op in ops):
            found = f"prefer = {' = '.join(pair)}, from {settings.source('prefer')}: no op with a rule has that name"
            yield Finding("settings", WARNING, found, "Correct it, or leave it out; `shardwise rules` lists the ops.")


def _conflicts() -> Iterator[Finding]:
    resolutions = plugin_states().registry.conflicts()
    for resolution in resolutions:
        found = f"{op_name(resolution.op)}: {'; '.join(map(str, resolution.rivals))}; {resolution.reason}"
        do = " or ".join(prefer_settings(resolution.op, entry)["environment"] for entry in resolution.rivals)
        yield Finding("rules", FAILED, found, f"Set {do}.")
    if not resolutions:
        yield Finding("rules", OK, "no op has rules in conflict")


# -- dependencies ----------------------------------------------------------------------------------------------------


def _dependencies() -> Iterator[Finding]:
    """What shardwise and the plugins' distributions require is installed, in versions that they take."""
    dists = {normalised(core_distribution().name): core_distribution()}
    dists |= {
        plugin.origin.distribution: plugin.entry.dist
        for plugin in discover(Settings())
        if plugin.entry.dist is not None
    }
    for name, dist in dists.items():
        wrong = list(_unmet(dist.requires or ()))
        for fault in wrong:
            yield Finding(
                "dependencies", FAILED, f"{name} {dist.version} {fault}", f"Run pip install --upgrade {name}."
            )
        if not wrong:
            yield Finding("dependencies", OK, f"{name} {dist.version} has what it requires")


def _unmet(requires: Iterable[str]) -> Iterator[str]:
    for line in requires:
        try:
            need = Requirement(line)
        except InvalidRequirement:
            yield f"has a requirement that cannot be read: {line!r}"
            continue
        if need.marker and not need.marker.evaluate({"extra": ""}):
            continue
        try:
            have = distribution(need.name).version
        except PackageNotFoundError:
            yield f"requires {need}, which is not installed"
            continue
        if not need.specifier.contains(have, prereleases=True):
            yield f"requires {need}, and {have} is installed"


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "shardwise": _copies,
    "settings": _settings,
    "link figures": _links,
    "plugins": _plugins,
    "preferences": _preferences,
    "rules": _conflicts,
    "dependencies": _dependencies,
}
