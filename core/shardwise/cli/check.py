"""``shardwise plugins check``: whether a plugin is correct, before a program uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from shardwise.cli.completion import offer_plugins_and_paths
from shardwise.cli.findings import FAILED, OK, WARNING, Finding, report
from shardwise.cli.modules import imported_from
from shardwise.cli.output import json_option, progress
from shardwise.cli.rule_checks import (
    Samples,
    check_conflicts,
    declared_samples,
    judge_rules,
    read_samples,
    register,
)
from shardwise.cli.static_checks import (
    check_conventions,
    check_entries,
    check_imports,
    check_packages,
    check_requires,
    check_surface,
)
from shardwise.cli.subject import SAMPLES, SAMPLES_GROUP, PluginToCheck, find_subject
from shardwise.discovery.entry_points import GROUP
from shardwise.kernel.first_party import is_first_party
from shardwise.kernel.registry import NO_LIBRARY, Registry
from shardwise.testing.light import probe

__all__ = ["check"]

CASES = 25
"""The default number of cases per op: each row has one, the rest is a seeded choice."""


@click.command(short_help="Check whether a plugin is ready to publish.")
@click.argument("plugin", metavar="NAME|PATH", shell_complete=offer_plugins_and_paths)
@click.option(
    "--samples",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help=f"A file with SAMPLES by op, and more.  [default: what the group {SAMPLES_GROUP} names, or {SAMPLES}]",
)
@click.option("--cases", type=click.IntRange(1), help=f"Cases per op that the oracle tries.  [default: {CASES}]")
@click.option("--full", is_flag=True, help="All cases.")
@click.option("--strict", is_flag=True, help="Warnings are failures.")
@json_option
def check(*, plugin: str, samples: Path | None, cases: int | None, full: bool, strict: bool, as_json: bool) -> None:
    """Check an installed plugin by NAME, or a checkout's folder, a wheel or a .py file by PATH: its metadata, what
    importing it pulls in, its hook, conflicts with other plugins, and every rule by the oracle.

    Exits with 1 when a check fails. What is checked is run: check only what you trust.
    """
    if full and cases is not None:
        raise click.UsageError("--full tries all cases: give --full or --cases, not both")
    most = None if full else cases or CASES
    with TemporaryDirectory(prefix="shardwise-check-") as scratch:
        subject = find_subject(plugin, Path(scratch))
        if not as_json:
            click.echo(f"{subject}\n")
        findings = [*_findings(subject, samples, most)]
    report(findings, as_json=as_json, strict=strict)


def _findings(subject: PluginToCheck, samples: Path | None, cases: int | None) -> Iterator[Finding]:
    yield from check_entries(subject)
    yield from check_requires(subject)
    yield from check_packages(subject)
    yield from check_conventions(subject)
    modules = [entry.module for entry in subject.entries if entry.group == GROUP]
    imported = probe(modules, subject.roots) if modules else {}
    yield from check_imports(subject, imported)
    yield from check_surface(imported, subject.name)
    if not modules or any(module.error for module in imported.values()):
        return
    packages = {module.partition(".")[0] for module in modules}
    with imported_from(subject.roots, sorted(packages) if subject.roots else ()):
        own, findings = register(subject)
        yield from findings
        if not any(True for _ in own.ops()) and not any(True for _ in own.later()):
            return
        yield from check_conflicts(subject, own)
        sample_file, findings = _samples(subject, samples)
        yield from findings
        if any(finding.result == FAILED for finding in findings):
            return
        yield from _later(own)  # the samples have imported the library
        with progress("oracle, rules") as tell:
            yield from judge_rules(own, sample_file, cases=cases, tell=tell)


def _later(own: Registry) -> Iterator[Finding]:
    """What is wrong with rules by the names of ops: those of libraries that nobody imports cannot be judged."""
    missing = own.missing_modules()
    for name, why in own.see_all().items():
        if why != NO_LIBRARY or name in missing:
            found = f"there is no module {missing[name]}" if name in missing else why
            do = "Correct its place in add_later() or add_modules(), or the module."
            yield Finding("later", FAILED, f"the rule of {name} cannot be had: {found}", do)
        else:
            do = "Import the library in the module of the samples."
            yield Finding("later", WARNING, f"the rule of {name} is not judged: {why}", do)


def _samples(subject: PluginToCheck, named: Path | None) -> tuple[Samples, list[Finding]]:
    """The samples of the file that the command names, those that the distribution declares, or its checkout's."""
    path = named or (None if subject.declared else subject.samples)
    where = str(path) if path else ", ".join(f"[{entry.group}] {entry.value}" for entry in subject.declared)
    try:
        if path is not None or subject.declared:
            given = read_samples(path) if path is not None else declared_samples(subject.declared)
            if not (given.samples or given.unsampled):
                found = f"{where} has no sample: SAMPLES is empty, so samples are guessed from the schemas"
                return given, [Finding("samples", WARNING, found, "Add the calls of each op to SAMPLES.")]
            return given, [] if path is not None else [Finding("samples", OK, where)]
    except Exception as error:  # noqa: BLE001  samples are their author's code
        do = "Correct the file." if path else "Correct the module, and see that the wheel has it."
        return Samples(), [Finding("samples", FAILED, f"{where}: {type(error).__name__}: {error}", do)]
    if subject.kind == "file" or is_first_party(subject.name):
        return Samples(), []
    line = f'[project.entry-points."{SAMPLES_GROUP}"] {subject.name} = "PACKAGE.samples"'
    found = f"it declares none in the group {SAMPLES_GROUP}"
    found += f", and there is no {SAMPLES}" if subject.kind == "checkout" else ""
    do = f"Write a module with SAMPLES and declare it: {line}. Without, samples are guessed from the schemas."
    return Samples(), [Finding("samples", WARNING, found, do)]
