"""Write docs/reference.md from docstrings: every public name, with its signature as the source has it."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"
MODULES = {
    "shardwise": "What programs use: `import shardwise as sw`.",
    "shardwise.rule": "What authors of rules use: see [how a rule reads](rules.md) and [lowerings](lowerings.md).",
    "shardwise.hookspecs": "What a plugin's `plugin.py` implements: see [plugins](plugins.md).",
    "shardwise.errors": "Each error has the fields `asked`, `found` and `do`, and those that its text names.",
    "shardwise.checkpoint": "See [checkpoints](checkpoints.md).",
    "shardwise.testing": "See [testing a plugin](testing.md).",
}
HEAD = """# Reference

Generated from the docstrings by `nox -s reference`: the public names, in the order of the alphabet.
"""


def page() -> str:
    """The text of the page."""
    known: dict[int, str] = {}
    parts = [HEAD]
    for dotted, about in MODULES.items():
        module = import_module(dotted)
        parts.append(f"## {dotted}\n\n{about}\n")
        for name in sorted(public(module), key=str.lower):
            value = getattr(module, name)
            parts.append(f"### `{name}`\n\n{_entry(module, name, value, known)}\n")
            if not isinstance(value, (str, tuple)):
                known.setdefault(id(value), f"{dotted}.{name}")
    return "\n".join(parts)


def public(module: ModuleType) -> list[str]:
    """The names of a module that others may rely on."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]


def _entry(module: ModuleType, name: str, value: Any, known: dict[int, str]) -> str:
    if id(value) in known and not isinstance(value, (str, tuple)):
        return f"The same as `{known[id(value)]}`."
    if inspect.ismodule(value):
        return _prose(value.__doc__)
    origin = getattr(value, "__module__", "") or ""
    if inspect.isclass(value) and origin.startswith("torch."):
        about = "" if name == "Op" else ": see [placements](meshes-and-placements.md#placements)"
        return f"Torch's own `{value.__qualname__}`{about}."
    function = inspect.unwrap(value) if callable(value) else value
    if inspect.isfunction(function):
        return f"```text\n{_signature(name, function)}\n```\n\n{_prose(inspect.getdoc(function))}"
    if inspect.isclass(value) and origin.startswith("shardwise"):
        return _class(value)
    shown = "" if " object at 0x" in repr(value) else f"\n\n```text\n{value!r}\n```"
    return _prose(_written_above(module, name)) + shown


def _class(kind: type) -> str:
    fields = [a.name for a in getattr(kind, "__attrs_attrs__", ()) if not a.name.startswith("_")]
    lines = [_prose(inspect.getdoc(kind) if kind.__doc__ else "")]
    if fields:
        lines.append("Fields: " + ", ".join(f"`{name}`" for name in fields) + ".")
    rows = list(_members(kind, set(fields)))
    if rows:
        lines.append("| | |\n|---|---|\n" + "\n".join(f"| `{name}` | {says} |" for name, says in rows))
    return "\n\n".join(line for line in lines if line)


def _members(kind: type, fields: set[str]) -> Iterator[tuple[str, str]]:
    """Public methods and properties that the class defines itself and describes, with their first paragraph."""
    for name, member in sorted(vars(kind).items()):
        function = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        if name.startswith("_") or name in fields or not inspect.isfunction(function) or not function.__doc__:
            continue
        is_called = function is member or isinstance(member, (classmethod, staticmethod))
        shown = f"{name}({', '.join(_arguments(member))})" if is_called else name
        first = _prose(inspect.getdoc(function)).partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        yield shown, first


def _arguments(member: Any) -> list[str]:
    """The names of a method's arguments, without the object or the class."""
    parameters = inspect.signature(getattr(member, "__func__", member)).parameters
    names = [{p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "") + n for n, p in parameters.items()]
    return names if isinstance(member, staticmethod) else names[1:]


def _signature(name: str, function: Any) -> str:
    """As the source has it: names, defaults and annotations."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    returns = f" -> {ast.unparse(tree.returns)}" if tree.returns else ""
    line = f"{name}({ast.unparse(tree.args)}){returns}"
    if len(line) <= 100:
        return line
    arguments = re.split(r", (?=[\w*]+(?::|,|=|$)|\*)", ast.unparse(tree.args))
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + f"){returns}"


def _written_above(module: ModuleType, name: str) -> str:
    """The ``#:`` lines above the assignment of a constant, in the module of shardwise that makes it."""
    for candidate in (module, *(m for n, m in sorted(sys.modules.items()) if n.startswith("shardwise."))):
        if getattr(candidate, name, None) is getattr(module, name) and getattr(candidate, "__file__", None):
            lines = inspect.getsource(candidate)
            comment = re.search(rf"((?:^#: .*\n)+)^{name}\b[^=\n]*= ", lines, re.MULTILINE)
            if comment:
                return comment[1].replace("#: ", "").strip()
    return ""


def _prose(text: str | None) -> str:
    """A docstring as Markdown: roles and double backticks become code."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text or "")
    text = re.sub(r"\bdocs/([\w-]+)\.md", r"[\1](\1.md)", text)
    return re.sub(r"::$", ":", inspect.cleandoc(text.replace("``", "`")), flags=re.MULTILINE)


if __name__ == "__main__":
    PAGE.write_text(page())
