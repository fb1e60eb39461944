"""The checks of a plugin's hook and of its rules: registration, conflicts with other plugins, the oracle."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

from attrs import field, frozen

from shardwise.cli.findings import FAILED, OK, WARNING, Finding
from shardwise.cli.modules import run_file
from shardwise.cli.plugin_states import load_each, readable_settings
from shardwise.cli.subject import PluginToCheck
from shardwise.discovery.entry_points import GROUP, InstalledPlugin, discover
from shardwise.discovery.loading import load
from shardwise.errors import PluginLoadError, RuleError
from shardwise.kernel.first_party import PROJECT
from shardwise.kernel.plurals import counted
from shardwise.kernel.precedence import Origin, resolve
from shardwise.kernel.registry import Registry
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.signature import Op, op_name
from shardwise.settings import normalised
from shardwise.testing.oracle import check_rule
from shardwise.testing.report import Report, RuleRefuted
from shardwise.testing.samples import by_op

__all__ = ["Samples", "check_conflicts", "declared_samples", "judge_rules", "read_samples", "register"]

# The number of ops that a finding names; the others are counted.
_MOST_NAMED = 5


def register(subject: PluginToCheck) -> tuple[Registry, list[Finding]]:
    """Call the plugin's hooks as a program would, each entry point by itself."""
    registry = Registry()
    findings = []
    for entry in subject.entries:
        if entry.group != GROUP:
            continue
        plugin = InstalledPlugin(Origin(entry.name, subject.name, subject.version), entry, "ready")
        try:
            (status,) = load([plugin], registry, strict=True)
        except PluginLoadError as error:
            if "implements no" not in error.found:
                do = "Correct the hook."
            elif entry.attr:
                do = f'The entry point names a module: {entry.name} = "{entry.module}".'
            else:
                do = "Mark it: @hookimpl from shardwise.hookspecs."
            findings.append(Finding("hook", FAILED, f"{entry.name}: {error.found}", do))
            continue
        rules = len(registry.rules(entry.name)) + len(registry.see_all())
        hooks = [name for name, given in (("links", registry.links), ("observers", registry.observers)) if given]
        if rules or hooks or registry.optimizers:
            findings.append(
                Finding("hook", OK, ", ".join([f"{counted(rules, 'rule')} for {counted(status.ops, 'op')}", *hooks]))
            )
        else:
            do = "Register the rules: registry.add(RULE, ...)."
            findings.append(Finding("hook", FAILED, f"{entry.name} registers nothing", do))
    return registry, findings


# -- conflicts -------------------------------------------------------------------------------------------------------


def check_conflicts(subject: PluginToCheck, own: Registry) -> Iterator[Finding]:
    """With the rules of other plugins for the same ops: one must declare that it replaces the other."""
    names = {entry.name for entry in subject.entries}
    others = Registry()
    for plugin in discover(readable_settings()):
        is_own = plugin.origin.distribution == normalised(subject.name) and (
            subject.name != PROJECT or plugin.origin.plugin in names
        )
        if plugin.status == "ready" and not is_own:
            load_each([plugin], others)
    clashes: dict[Origin, list[str]] = {}
    idle: dict[str, list[str]] = {}
    for entry in own.ops():
        rivals = others.find(entry.op)
        if resolve(entry.op, (), [entry, *rivals]).winner is None:
            for rival in rivals:
                clashes.setdefault(rival.origin, []).append(op_name(entry.op))
        if entry.replaces is not None and not any(rival.origin.is_called(entry.replaces) for rival in rivals):
            idle.setdefault(entry.replaces, []).append(op_name(entry.op))
    for origin, ops in clashes.items():
        found = f"{origin} has rules for {_some_ops(ops)} too, and nothing says which holds"
        name = PROJECT if origin.first_party else origin.distribution
        do = f'Declare replaces="{name}" on the rules that are to hold.'
        yield Finding("conflicts", FAILED if origin.first_party else WARNING, found, do)
    for name, ops in idle.items():
        yield Finding(
            "conflicts", WARNING, f"replaces={name!r}, which has no rule for {_some_ops(ops)}", "Leave it out."
        )
    if not clashes:
        replaced = sorted({entry.replaces for entry in own.ops() if entry.replaces})
        shown = f"replaces {', '.join(replaced)}" if replaced else "no other plugin has rules for its ops"
        yield Finding("conflicts", OK, f"none: {shown}")


def _some_ops(ops: list[str]) -> str:
    rest = len(ops) - _MOST_NAMED
    return ", ".join(ops[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


# -- the oracle ------------------------------------------------------------------------------------------------------


@frozen
class Samples:
    """What a file of samples declares.

    ``samples`` has calls by op. ``stand_ins`` has functions that run in place of ops that a machine lacks.
    ``unsampled`` has the ops without a sample, and ``unexercised`` the rows (``op: row``) that no sample reaches. Both
    give the reason.
    """

    samples: Mapping[Op, Callable[[], Any]] = field(factory=dict)
    stand_ins: Mapping[Op, Callable[..., Any]] = field(factory=dict)
    unsampled: Mapping[Op, str] = field(factory=dict)
    unexercised: Mapping[str, str] = field(factory=dict)


def read_samples(path: Path) -> Samples:
    """``SAMPLES``, ``STAND_INS``, ``UNSAMPLED`` and ``UNEXERCISED`` of a file; each may be missing.

    ``SAMPLES`` maps an op to a list of calls or to a function that makes one. Raises what the file raises,
    ``TypeError`` for one of them that is not a mapping, and ``LookupError`` if it has not one of them.
    """
    path_before = list(sys.path)
    sys.path.insert(0, str(path.parent))
    try:
        return _samples_of(run_file(path, "_samples_under_check"))
    finally:
        sys.path[:] = path_before


def declared_samples(entries: Iterable[EntryPoint]) -> Samples:
    """The same of the modules that a distribution declares. Raises what they raise, and as above."""
    all_of = Samples()
    for entry in entries:
        one = _samples_of(entry.load())
        all_of = Samples(
            {**all_of.samples, **one.samples},
            {**all_of.stand_ins, **one.stand_ins},
            {**all_of.unsampled, **one.unsampled},
            {**all_of.unexercised, **one.unexercised},
        )
    return all_of


_NAMES = ("SAMPLES", "STAND_INS", "UNSAMPLED", "UNEXERCISED")


def _samples_of(module: ModuleType) -> Samples:
    if not any(hasattr(module, name) for name in _NAMES):
        near = [name for name in vars(module) if get_close_matches(name.upper(), _NAMES, n=1)]
        raise LookupError(f"it defines no SAMPLES{f', but {near[0]}' if near else ''}")
    samples, stand_ins, unsampled = (by_op(_mapping(module, n)) for n in ("SAMPLES", "STAND_INS", "UNSAMPLED"))
    makers = {op: calls if callable(calls) else partial(list, calls) for op, calls in samples.items()}
    return Samples(makers, stand_ins, unsampled, _mapping(module, "UNEXERCISED"))


def _mapping(module: ModuleType, name: str) -> Mapping[Any, Any]:
    value = getattr(module, name, {})
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is a {type(value).__name__}, not a mapping")
    return value


def judge_rules(
    own: Registry, given: Samples, *, cases: int | None, tell: Callable[[int, int], None] | None = None
) -> list[Finding]:
    """The oracle over every rule: what it refutes, the rows and ops that no sample reached, and the counts.

    ``tell`` is called with how many rules are done and how many there are.
    """
    rules = own.rules()
    findings: list[Finding] = []
    unknown = [str(op) for op in [*given.samples, *given.unsampled] if op not in own]
    if unknown:
        found = f"the plugin has no rule for {_some_ops(unknown)}"
        findings.append(Finding("samples", WARNING, found, "Correct the samples file."))
    total = Report()
    for done, rule in enumerate(rules):
        if tell is not None:
            tell(done, len(rules))
        try:
            report = check_rule(rule, given.samples, stand_ins={**given.stand_ins}, cases=cases, keep_going=True)
        except RuleError as error:
            findings.append(Finding("oracle", FAILED, f"{_rule_title(rule)}: {error.found}", error.do))
            continue
        except Exception as error:  # noqa: BLE001  samples and stand-ins are a plugin's functions
            found = f"{_rule_title(rule)}: its samples raise {type(error).__name__}: {error}"
            findings.append(Finding("oracle", FAILED, found, "Correct SAMPLES or STAND_INS."))
            continue
        total += report
        findings += _oracle_findings(rule, report, given)
    if tell is not None:
        tell(len(rules), len(rules))
    if not rules:
        return findings
    refuted = len(_blamed(total.refuted))
    counts = (counted(total.ops, "op"), counted(total.rows, "row"), counted(total.cases, "case"))
    shown = f"{', '.join(counts)}: {refuted} refuted"
    if refuted:
        do = "Correct the rules; until then they give wrong numbers."
        return [*findings, Finding("oracle", FAILED, shown, do)]
    if not total.cases and not any(finding.result == FAILED for finding in findings):
        # Reasons why ops have no samples are good for some of them: of a plugin that was never tried nothing is known.
        do = "Add calls to SAMPLES, and functions to STAND_INS for ops that this machine lacks."
        return [*findings, Finding("oracle", FAILED, f"{shown}; no row was tried, so nothing is known of it", do)]
    return [*findings, Finding("oracle", OK, shown)]


def _oracle_findings(rule: AnyRule, report: Report, given: Samples) -> Iterator[Finding]:
    for refuted in _blamed(report.refuted):
        yield Finding("oracle", FAILED, f"{refuted.asked}: {refuted.found}", refuted.do)
    missed = [row for row in report.unexercised if row not in given.unexercised]
    if missed:
        found = f"{_rule_title(rule)}: no sample reaches the rows {'; '.join(missed)}"
        do = "Add samples to which the rows apply, or the reason to UNEXERCISED, or remove the rows."
        yield Finding("oracle", WARNING, found, do)
    for row in report.unexercised:
        if row in given.unexercised:
            yield Finding("oracle", OK, f"{row}: not judged, {given.unexercised[row]}")
    reasons = {op_name(op): reason for op, reason in given.unsampled.items()}
    for op in report.unsampled:
        if op in reasons:
            yield Finding("oracle", OK, f"{op}: not judged, {reasons[op]}")
        else:
            found = f"{op}: none of its samples is legal on this machine, or it has none"
            yield Finding("oracle", WARNING, found, "Add calls of it to SAMPLES, or the reason to UNSAMPLED.")


def _blamed(refuted: Sequence[RuleRefuted]) -> list[RuleRefuted]:
    """One refutation per wrong row: a row that is refuted alone, or the row that most refuted combinations share."""
    left = [one for one in refuted if one.rows]
    first_causes = [one for one in refuted if not one.rows]
    while left:
        alone = [(one.op, one.rows[0]) for one in left if len(set(one.rows)) == 1]
        blamed = Counter(alone or [(one.op, row) for one in left for row in set(one.rows)]).most_common(1)[0][0]
        theirs = [one for one in left if (one.op, blamed[1]) == blamed and blamed[1] in one.rows]
        first_causes.append(min(theirs, key=lambda one: len(one.rows)))
        left = [one for one in left if one not in theirs]
    return first_causes


def _rule_title(rule: AnyRule) -> str:
    first, *rest = rule.ops
    return f"{op_name(first)}{f' and {len(rest)} more' if rest else ''} ({rule.source})"
