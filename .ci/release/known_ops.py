"""Write which op is where: the families that have it, and in each family the module; `nox -s known_ops` runs it.

The first is for the error where a family is not installed, the second has a family's modules imported at the first use.
"""

from __future__ import annotations

import pkgutil
import textwrap
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path

import torch

from shardwise.discovery.process import default_registry
from shardwise.kernel.first_party import FAMILIES
from shardwise.kernel.known_rules import OPS, table
from shardwise.kernel.registrar import stem_of
from shardwise.kernel.rule import AnyRule
from shardwise.kernel.signature import op_name

__all__ = ["OPS", "index_of", "indices", "modules_of", "stems_of", "text"]

_HEAD = '''"""Which module has the rules of which ops, for all versions of torch. `nox -s known_ops` writes it."""

MODULES = {
'''


def text() -> str:
    """The text of the file of families, from the modules of those that are installed."""
    ops = [
        (family, op_name(op))
        for family in FAMILIES
        for rules in modules_of(family.replace("-", "_")).values()
        for rule in rules
        for op in rule.ops
    ]
    ops += [(origin.plugin, name) for name, origin in default_registry().later() if origin.plugin in FAMILIES]
    return table(ops)


# -- the modules of a family -----------------------------------------------------------------------------------------


def modules_of(package: str) -> dict[str, Sequence[AnyRule]]:
    """The modules of a package that have rules, and the rules."""
    names = sorted(m.name for m in pkgutil.iter_modules(import_module(package).__path__, f"{package}."))
    rules = {name: getattr(import_module(name), "RULES", ()) for name in names}
    return {name: own for name, own in rules.items() if own}


def stems_of(package: str) -> dict[str, set[str]]:
    """The stems of the ops that this torch has and that a package has rules for, by module."""
    modules = modules_of(package).items()
    return {name: {stem_of(op.name()) for rule in rules for op in rule.ops} for name, rules in modules}


def _there(stem: str) -> bool:
    namespace, _, packet = stem.partition("::")
    return any(hasattr(getattr(torch.ops, namespace), name) for name in (packet, f"{packet}_"))


def index_of(package: str) -> str:
    """The text of a package's index: the ops of this torch, and those of its old index that only another torch has."""
    try:
        old: dict[str, str] = import_module(f"{package}.index").MODULES
    except ModuleNotFoundError:
        old = {}
    lines = []
    for module, stems in stems_of(package).items():
        kept = {stem for stem in old.get(module, "").split() if not _there(stem)}
        names = textwrap.wrap(" ".join(sorted(stems | kept)), width=110, break_on_hyphens=False)
        lines.append(f'    "{module}": """\n' + "".join(f"        {line}\n" for line in names) + '    """,\n')
    return f"{_HEAD}{''.join(lines)}}}\n"


def indices() -> Iterator[tuple[Path, str]]:
    """The file of each family's index, and its text."""
    for family in FAMILIES:
        package = family.replace("-", "_")
        yield Path(import_module(package).__path__[0]) / "index.py", index_of(package)


if __name__ == "__main__":
    for path, index in indices():
        path.write_text(index, encoding="utf-8")
    OPS.write_text(text(), encoding="utf-8")
