"""Which names of torch that are not public the source of core and plugins has, read from its syntax."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from attrs import define

import shardwise

ROOT = Path(shardwise.__file__).parents[2]
SHELF = ROOT / "core" / "shardwise" / "private_torch"

DOTTED = re.compile(r"(torch|functorch)(\.\w+)+")
# Such names are Python's or documented, but for these.
PROTOCOL = re.compile(r"__\w+__")
UNDOCUMENTED = {"__coerce_same_metadata_as_tangent__"}
# What torch's C++ constructor of wrappers sets on a tensor of ours, and what tests of Python have.
OURS = {"_local_tensor", "_spec"}


def is_private(name: str) -> bool:
    parts = name.split(".")
    return any(p.startswith("_") and (p in UNDOCUMENTED or not PROTOCOL.fullmatch(p)) for p in parts)


def is_op(name: str) -> bool:
    """Ops of ``torch.ops.aten`` have a schema that is kept; a name with an underscore is no exception."""
    return re.fullmatch(r"torch\.ops\.aten\.\w+(\.[A-Za-z]\w*)?", name) is not None


@define(slots=False)
class Source:
    """One file."""

    path: Path

    @cached_property
    def nodes(self) -> dict[type[ast.AST], list[Any]]:
        """The nodes of each type: a file has thousands, and each question is about a few."""
        by_type: dict[type[ast.AST], list[Any]] = defaultdict(list)
        for node in ast.walk(ast.parse(self.path.read_text())):
            by_type[type(node)].append(node)
        return by_type

    @cached_property
    def imported(self) -> dict[str, str]:
        """Names of this file for modules, and what is in them, with their dotted names."""
        names = {"torch": "torch"}
        for node in self.nodes[ast.Import]:
            names |= {
                a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                for a in node.names
            }
        for node in self.nodes[ast.ImportFrom]:
            if node.module:
                names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        return names

    @cached_property
    def defined(self) -> set[str]:
        """Names that this file defines: its functions and classes, their attributes, and its variables."""
        names = {n.name for n in (*self.nodes[ast.FunctionDef], *self.nodes[ast.ClassDef])}
        names |= {n.id for n in self.nodes[ast.Name] if isinstance(n.ctx, ast.Store)}
        return names | {n.attr for n in self.nodes[ast.Attribute] if isinstance(n.ctx, ast.Store) and _is_self(n)}

    def dotted(self, node: ast.AST) -> str | None:
        """The dotted name of ``a.b.c`` whose first name is imported."""
        if isinstance(node, ast.Attribute):
            below = self.dotted(node.value)
            return below and f"{below}.{node.attr}"
        return self.imported.get(node.id) if isinstance(node, ast.Name) else None

    def imports(self) -> Iterator[str]:
        for node in self.nodes[ast.Import]:
            yield from (a.name for a in node.names)
        for node in self.nodes[ast.ImportFrom]:
            if node.module:
                yield from (f"{node.module}.{a.name}" for a in node.names)

    def names(self) -> Iterator[str]:
        """Private names of torch that are imported, that are written as ``torch.a._b``, or that are strings."""
        strings = (n.value for n in self.nodes[ast.Constant] if isinstance(n.value, str))
        chains = map(self.dotted, self.nodes[ast.Attribute])
        asked = (
            f"{owner}.{n.args[1].value}"
            for n in self.nodes[ast.Call]
            if getattr(n.func, "id", "") in {"getattr", "hasattr", "setattr"}
            if (owner := self.dotted(n.args[0])) and isinstance(n.args[1], ast.Constant)
        )
        keys = (k.value for n in self.nodes[ast.Dict] for k in n.keys if isinstance(k, ast.Constant))
        of_cuda = (f"torch.cuda.{key}" for key in keys if isinstance(key, str) and hasattr(torch.cuda, key))
        for name in (*self.imports(), *chains, *strings, *asked, *of_cuda):
            if name and DOTTED.fullmatch(name) and is_private(name) and not is_op(name):
                yield name

    def attributes(self) -> Iterator[str]:
        """Private attributes of objects that the file does not define: ``._schema``. Of modules only torch's."""
        ours = OURS | self.defined
        for node in self.nodes[ast.Attribute]:
            name = node.attr
            if not name.startswith("_") or name in ours or _is_self(node) or self.dotted(node.value) is not None:
                continue
            if not is_op(f"torch.ops.{ast.unparse(node)}"):
                yield name
        for node in self.nodes[ast.Call]:
            called = getattr(node.func, "id", "")
            if called in {"getattr", "hasattr", "setattr"}:
                if self.dotted(node.args[0]) is None and isinstance(node.args[1], ast.Constant):
                    yield node.args[1].value
            elif called == "replaced":
                yield from (k.arg for k in node.keywords if k.arg)

    def uses(self) -> set[str]:
        return set(self.names()) | {f".{name}" for name in self.attributes() if is_private(name)}


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}


def shelf() -> set[str]:
    """The private names that the shelf has."""
    names = set().union(*(Source(path).uses() for path in sorted(SHELF.glob("*.py"))))
    # What leads to a name is no use by itself.
    return {n for n in names if not any(other.startswith(f"{n}.") for other in names)}


def elsewhere(private: set[str]) -> list[str]:
    """The private names of torch in the rest of core and in plugins; ``private`` are attributes that torch has."""
    found = []
    for folder in ("core", "plugins"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.parent != SHELF:
                source = Source(path)
                names = {n for n in source.uses() if not n.startswith(".") or n in private}
                found += [f"{path.relative_to(ROOT)}: {name}" for name in sorted(names)]
    return found
