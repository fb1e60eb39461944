"""The house: who may import whom, in core and from plugins (docs/how-it-works.md), and that core names no operator."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import shardwise

CORE = Path(shardwise.__file__).parent
ROOT = CORE.parents[1]

# From the ground up. A part imports parts of lower storeys only; parts of one storey know nothing of each other.
STOREYS = (
    "errors",
    "settings private_torch",
    "kernel rng",
    "hookspecs rule",
    "discovery",
    "planning",
    "program",
    "comm",
    "engine",
    "tensor",
    "tools checkpoint",
    "steps",
    "testing random",
    "shardwise",
    "demo",
    "cli",
)
STOREY = {part: number for number, parts in enumerate(STOREYS) for part in parts.split()}
NAMES_OPERATORS = {"private_torch", "testing", "demo", "cli"}
AUTHORING = {"shardwise.rule", "shardwise.hookspecs", "shardwise.errors"}
# A whole string; an operator named in the prose of a message or a docstring is an example.
OPERATOR_NAME = re.compile(r"aten(?:\.|::)\S+")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


def part_of(path: Path) -> str:
    """The part that a file of core belongs to. What ``python -m`` runs is a command, wherever it lies."""
    first = path.relative_to(CORE).parts[0]
    if path.name == "__main__.py":
        return "cli"
    return "shardwise" if first == "__init__.py" else first.removesuffix(".py")


def part(dotted: str) -> str | None:
    """The part of core that a dotted name lies in, or None for a name from elsewhere."""
    first, *rest = dotted.split(".")
    if first != "shardwise":
        return None
    return rest[0] if rest and rest[0] in STOREY else "shardwise"


def statements(tree: ast.AST, *, typing: bool) -> Iterator[ast.AST]:
    """All nodes; without ``typing`` those that exist at run time: what is under ``if TYPE_CHECKING`` does not."""
    left = [tree]
    while left:
        node = left.pop()
        if not typing and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        left += ast.iter_child_nodes(node)


def imports(tree: ast.AST, *, typing: bool = True) -> Iterator[str]:
    """Dotted names of everything that is imported, at the top or inside a function."""
    for node in statements(tree, typing=typing):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_imports_go_down():
    wrong = [
        f"{shown(path)} imports {dotted}"
        for path in sorted(CORE.rglob("*.py"))
        for dotted in imports(parsed(path), typing=part_of(path) != "shardwise")
        if part(dotted) not in (None, part_of(path)) and STOREY[part(dotted)] >= STOREY[part_of(path)]
    ]
    assert not wrong, "\n".join(wrong)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(CORE.parent).with_suffix("").parts).removesuffix(".__init__")


def test_no_package_has_a_circle():
    wrong = []
    for package in sorted(path.parent for path in CORE.glob("*/__init__.py")):
        modules = {module_name(path): path for path in package.rglob("*.py")}
        graph = {
            name: {end for dotted in imports(parsed(path), typing=False) if (end := inside(dotted, modules)) != name}
            for name, path in modules.items()
        }
        try:
            TopologicalSorter({name: ends - {None} for name, ends in graph.items()}).prepare()
        except CycleError as error:
            wrong.append(" -> ".join(error.args[1]))
    assert not wrong, "\n".join(wrong)


def inside(dotted: str, modules: dict[str, Path]) -> str | None:
    """The module of a package that ``from a.b import c`` reads: a.b.c, or a.b where that is not a module."""
    return dotted if dotted in modules else next((m for m in (dotted.rpartition(".")[0],) if m in modules), None)


def operator_names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "aten":
            yield f"line {node.lineno}: aten"
        elif isinstance(node, ast.Attribute) and node.attr == "ops" and ast.unparse(node) == "torch.ops":
            yield f"line {node.lineno}: torch.ops"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OPERATOR_NAME.fullmatch(node.value):
            yield f"line {node.lineno}: {node.value}"


def test_core_imports_no_plugin_and_names_no_operator():
    wrong = []
    for path in sorted(CORE.rglob("*.py")):
        plugins = [dotted for dotted in imports(parsed(path)) if dotted.startswith("shardwise_")]
        operators = [] if part_of(path) in NAMES_OPERATORS else operator_names(parsed(path))
        wrong += [f"{shown(path)}: {what}" for what in (*plugins, *operators)]
    assert not wrong, "\n".join(wrong)


def test_plugins_import_the_authoring_surface_only():
    wrong = [
        f"{shown(path)} imports {dotted}"
        for path in sorted((ROOT / "plugins").rglob("*.py"))
        for dotted in imports(parsed(path))
        if part(dotted) is not None and dotted.rpartition(".")[0] not in AUTHORING
    ]
    assert not wrong, "\n".join(wrong)


PLANTED = """
import torch
def f():
    from shardwise.tensor import MeshTensor
    return torch.ops.prim, "aten::mm"
def g(): return aten.mm
"""


def test_the_checks_see_what_they_forbid():
    tree = ast.parse(PLANTED)
    assert "shardwise.tensor.MeshTensor" in set(imports(tree))
    assert part("shardwise.tensor.MeshTensor") == "tensor"
    assert len(list(operator_names(tree))) == 3
    assert set(STOREY) == {part_of(path) for path in CORE.rglob("*.py")}, "a part of core has no storey"
