"""The checks of a plugin that run none of its rules: metadata, imports, the hook, conflicts with other plugins."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet

from shardwise.cli.findings import FAILED, NOTE, OK, WARNING, Finding
from shardwise.cli.subject import PluginToCheck
from shardwise.discovery.entry_points import GROUP
from shardwise.kernel.first_party import CORE, PROJECT, core_version, is_first_party
from shardwise.kernel.plurals import counted
from shardwise.settings import normalised
from shardwise.testing.light import Imported

__all__ = [
    "check_conventions",
    "check_entries",
    "check_imports",
    "check_packages",
    "check_requires",
    "check_surface",
]

# What a plugin may import: the public package, what rules are written with, what the rare hooks return.
SURFACE = frozenset(
    {"shardwise", "shardwise.errors", "shardwise.hookspecs", "shardwise.rule", "shardwise.planning.cost"}
)
# The test kit, whole.
KIT = f"{PROJECT}.testing"


def check_entries(subject: PluginToCheck) -> Iterator[Finding]:
    """Check that there is an entry point in the group that this shardwise reads, with the distribution's name."""
    if subject.kind == "file":
        return
    current = [entry for entry in subject.entries if entry.group == GROUP]
    line = f'[project.entry-points."{GROUP}"]'
    for entry in subject.entries:
        if entry.group != GROUP and entry.name not in {e.name for e in current}:
            yield Finding("entry point", FAILED, f"it registers under {entry.group}", f"Register under {GROUP}.")
    if not current:
        if not subject.entries:
            value = f'{subject.name} = "{subject.name.replace("-", "_")}.plugin"'
            yield Finding("entry point", FAILED, f"the group {GROUP} has no entry", f"Add {line} {value}")
        return
    for entry in current:
        shown = f"{entry.name} = {entry.value}"
        if normalised(entry.name) == normalised(subject.name) or is_first_party(subject.name):
            yield Finding("entry point", OK, shown)
        else:
            do = f"Call it {subject.name}: settings and messages name plugins by it."
            yield Finding("entry point", FAILED, f"{shown} has not the name of the distribution, {subject.name}", do)


def check_requires(subject: PluginToCheck) -> Iterator[Finding]:
    """Check that the distribution bounds the versions of shardwise that it works with, and that this one is one."""
    if subject.kind == "file" or is_first_party(subject.name):
        return
    if subject.requires is None:
        found, do = "dependencies are made when it is built", "Build a wheel and check that."
        yield Finding("requires", WARNING, found, do)
        return
    specifiers: SpecifierSet | None = None
    for line in subject.requires:
        try:
            need = Requirement(line)
        except InvalidRequirement:
            continue
        if normalised(need.name) in (PROJECT, CORE) and not (need.marker and not need.marker.evaluate({"extra": ""})):
            specifiers = need.specifier if specifiers is None else specifiers & need.specifier
    have = core_version()
    do = f'Depend on "shardwise>={have},<..." with the first release that may break it as the bound.'
    if specifiers is None:
        yield Finding("requires", FAILED, "it does not depend on shardwise", do)
        return
    shown = f"shardwise{specifiers}"
    if not specifiers.contains(have, prereleases=True):
        yield Finding(
            "requires", FAILED, f"{shown}, and {have} is installed: it would be refused", "Correct the bounds."
        )
        return
    signs = {specifier.operator for specifier in specifiers}
    missing = [
        name
        for name, those in (("lower", {">=", ">", "==", "~=", "==="}), ("upper", {"<", "<=", "==", "~=", "==="}))
        if not signs & those
    ]
    yield (
        Finding("requires", WARNING, f"{shown} has no {' and no '.join(missing)} bound", do)
        if missing
        else Finding("requires", OK, shown)
    )


def check_packages(subject: PluginToCheck) -> Iterator[Finding]:
    """Check that what goes into the wheel is there: a checkout works without it, and the wheel does not."""
    for package in subject.absent:
        found = f"pyproject.toml has {package} for the wheel, and there is no such folder"
        yield Finding("packages", FAILED, found, "Correct packages in [tool.hatch.build.targets.wheel].")


def check_conventions(subject: PluginToCheck) -> Iterator[Finding]:
    """Note what others expect of a plugin and shardwise itself does not need: the keyword, and that it is typed."""
    if subject.kind == "file" or is_first_party(subject.name):
        return
    if subject.keywords is not None and PROJECT not in {word.lower() for word in subject.keywords}:
        found = f"the distribution has not the keyword {PROJECT}: a search of a package index does not find it"
        yield Finding("keyword", NOTE, found, f'Add keywords = ["{PROJECT}", ...] to [project].')
    modules = [entry.module for entry in subject.entries if entry.group == GROUP]
    for package in sorted({module.partition(".")[0] for module in modules}):
        folders = [folder for module in modules for folder in _folders(package, module, subject.roots)]
        if folders and not any((folder / "py.typed").is_file() for folder in folders):
            found = f"the package {package} has no py.typed: type checkers do not look at its annotations"
            yield Finding("typed", NOTE, found, f"Add an empty file py.typed to {package}.")


def _folders(package: str, module: str, roots: Sequence[Path]) -> Iterator[Path]:
    """The folders of the packages that a module lies in, where they are; none for a module by itself."""
    places = [*roots] if roots else [Path(entry or ".") for entry in sys.path]
    parts = module.split(".")
    if parts[0] != package:
        return
    for place in places:
        if (place / package).is_dir():
            folders = (place.joinpath(*parts[:n]) for n in range(1, len(parts) + 1))
            yield from (folder for folder in folders if folder.is_dir())
            return


def check_imports(subject: PluginToCheck, imported: dict[str, Imported]) -> Iterator[Finding]:
    """Check that every plugin module can be imported from where it lies, and is cheap: programs wait for the import."""
    for name, module in imported.items():
        file = Path(module.file).resolve()
        if module.error:
            yield Finding("import", FAILED, f"{name}: {module.error}", "Correct the module, or install what it needs.")
        elif subject.roots and not any(file.is_relative_to(root.resolve()) for root in subject.roots):
            found = f"{name} comes from {module.file}"
            yield Finding(
                "import", FAILED, found, f"Give the package a name that is its own: it is not in {subject.roots[0]}."
            )
        elif module.pulled:
            found = f"{name} imports {', '.join(module.pulled)} ({module.seconds:.2f} s)"
            do = "Import it in the functions that use it: every program that looks up a rule waits for this."
            yield Finding("import", WARNING, found, do)
        else:
            yield Finding("import", OK, f"{name}: {module.seconds * 1e3:.0f} ms, nothing but what torch brings")


# -- what it imports of shardwise ------------------------------------------------------------------------------------


def check_surface(imported: dict[str, Imported], name: str) -> Iterator[Finding]:
    """Check that it imports only the stable parts of shardwise: the authoring surface and the public package."""
    files: set[Path] = set()
    for path in (Path(module.file) for module in imported.values() if module.file):
        is_package = (path.parent / "__init__.py").is_file()
        files |= set(path.parent.rglob("*.py")) if is_package else {path}
    inner: dict[str, str] = {}
    for path in sorted(files):
        for module, line in _inner_modules(path):
            inner.setdefault(module, f"{path.name}:{line}")
    if inner:
        found = ", ".join(f"{module} ({where})" for module, where in sorted(inner.items()))
        do = "Use shardwise.rule, .hookspecs, .errors or what `import shardwise` offers."
        yield Finding("surface", WARNING, f"{name} imports inner modules, which may change: {found}", do)
    elif files:
        found = f"{counted(len(files), 'file')} looked at: nothing of shardwise is imported but its authoring surface"
        yield Finding("surface", OK, found)


def _inner_modules(path: Path) -> Iterator[tuple[str, int]]:
    """Modules of shardwise outside the surface that a file imports, with the line. Imports for type checkers do not
    count.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return  # importing it says so
    for node in _that_run(tree):
        if not isinstance(node, (ast.Import, ast.ImportFrom)) or getattr(node, "level", None):
            continue
        prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
        for name in (f"{prefix}{alias.name}" for alias in node.names):
            if name.split(".")[0] == PROJECT:
                module = name if _is_module(name) else name.rpartition(".")[0]
                if module not in SURFACE and not f"{module}.".startswith(f"{KIT}."):
                    yield module, node.lineno


def _that_run(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from _that_run(node)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # it lies in no package: the name of a class, say
        return False
