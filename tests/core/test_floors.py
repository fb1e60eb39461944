"""The floors: an import in core only goes down, core imports no plugin, and core names no operator."""

import ast
import re
from pathlib import Path

import pytest

import shardwise

CORE = Path(shardwise.__file__).parent
ROOT = CORE.parents[1]

# From the ground up. A module may import from lower floors only; a new module gets its line here.
# `shardwise` is the package's own __init__; checkpoint, testing, demo and cli are packages whose modules share a floor.
FLOORS = (
    {"errors", "events", "graph_calls", "philox", "start"},
    {"in_graph"},
    {"placements", "private_torch", "carried", "sampling", "traceable", "settings"},
    {"draws", "sizes"},
    {"spec", "notation"},
    {"signature", "layout", "chunks", "varying"},
    {"traced"},
    {"schema", "flow", "lowering"},
    {"pattern"},
    {"rule"},
    {"meta", "cost", "bindings"},
    {"link_file", "fitting"},
    {"moves"},
    {"estimate"},
    {"search"},
    {"transition"},
    {"strategy"},
    {"choice", "exclusion"},
    {"planner", "precedence"},
    {"describe", "finding"},
    {"registry"},
    {"hookspecs", "decomposition", "replication"},
    {"placing", "returned"},
    {"discovery", "flight"},
    {"collectives"},
    {"groups"},
    {"movers", "link_agreement", "rule_agreement"},
    {"redistribute"},
    {"comm"},
    {"timing"},
    {"calibration"},
    {"plan"},
    {"handlers", "call_plans", "rehearsal"},
    {"unknown", "one_device", "symbolic_calls"},
    {"dispatcher"},
    {"waiting"},
    {"gradient"},
    {"tensor"},
    {"api", "coverage", "explanation", "factories", "leaving", "prefetch", "random", "stepping"},
    {"planning"},
    {"checkpoint", "state_dicts"},
    {"shardwise"},
    {"testing"},
    {"demo"},
    {"cli"},
)
FLOOR_OF = {name: number for number, floor in enumerate(FLOORS) for name in floor}
NAMES_OPERATORS = {"private_torch", "testing", "demo", "cli"}
# A whole string; an operator named in the prose of a message or a docstring is an example.
OPERATOR_NAME = re.compile(r"aten(?:\.|::)\S+")

FILES = sorted(CORE.rglob("*.py"))


def module_of(path):
    first = path.relative_to(CORE).parts[0]
    return "shardwise" if first == "__init__.py" else first.removesuffix(".py")


def runs(tree):
    """All nodes that exist at run time: what is under ``if TYPE_CHECKING`` does not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from runs(node)


def imports(tree):
    """Dotted names of everything that is imported, at the top or inside a function."""
    for node in runs(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def core_module(dotted):
    """The core module that a dotted name lies in, or None for a name from elsewhere."""
    first, *rest = dotted.split(".")
    if first != "shardwise":
        return None
    return rest[0] if rest and rest[0] in FLOOR_OF else "shardwise"


def parsed(path):
    return ast.parse(path.read_text(), str(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_imports_go_down(path):
    module = module_of(path)
    assert module in FLOOR_OF, f"give {module} a floor in {Path(__file__).name}"
    for dotted in imports(parsed(path)):
        target = core_module(dotted)
        if target not in (None, module):
            assert FLOOR_OF[target] < FLOOR_OF[module], f"{module} imports {dotted}, which is not below it"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_core_imports_no_plugin(path):
    for dotted in imports(parsed(path)):
        assert not dotted.startswith("shardwise_"), f"{dotted}: plugins come in through entry points"


def operator_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "aten":
            yield f"line {node.lineno}: aten"
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.ops":
            yield f"line {node.lineno}: torch.ops"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and OPERATOR_NAME.fullmatch(node.value):
            yield f"line {node.lineno}: {node.value}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CORE)))
def test_core_names_no_operator(path):
    if module_of(path) not in NAMES_OPERATORS:
        assert list(operator_names(parsed(path))) == []


AUTHORING = {"errors", "hookspecs", "lowering", "placements", "rule", "schema", "signature", "spec"}
PLUGIN_FILES = sorted((ROOT / "plugins").glob("shardwise_*/**/*.py"))


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_plugins_import_the_authoring_surface_only(path):
    for dotted in imports(parsed(path)):
        assert core_module(dotted) in AUTHORING | {None}, f"{dotted} is not part of the authoring surface"


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
    assert core_module("shardwise.tensor.MeshTensor") == "tensor"
    assert len(list(operator_names(tree))) == 3
