"""The distributions of a release, made from the one pyproject.toml of the checkout: core, each family, and shardwise.

Each gets a folder with a pyproject.toml of its own, derived from the root's, and a copy of its package; hatchling
builds its source distribution and its wheel there. Run: python .ci/release/distributions.py FOLDER [NAME ...]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any

__all__ = ["Project", "build", "projects"]

ROOT = Path(__file__).resolve().parents[2]
GROUP = "shardwise.plugins.v1"
Project = dict[str, Any]

# Of the root's [project]: what is the same in all of them.
SHARED = ("version", "license", "requires-python", "authors", "keywords", "classifiers")


def projects() -> dict[str, Project]:
    """The content of the pyproject.toml of each distribution, by name."""
    root = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = root["project"]
    shared = {key: project[key] for key in SHARED} | {"readme": "README.md", "license-files": ["LICENSE"]}
    exactly = f"=={project['version']}"
    test = {"test": project["optional-dependencies"]["test"]}
    core = {
        **shared,
        "name": "shardwise-core",
        "description": "The framework of shardwise without a rule: operator sharding for PyTorch by plugins",
        "dependencies": project["dependencies"],
        "optional-dependencies": test,
        "scripts": project["scripts"],
    }
    made = {"shardwise-core": _pyproject(root, core, ["shardwise"])}
    for name, module in project["entry-points"][GROUP].items():
        package = module.partition(".")[0]
        family = {
            **shared,
            "name": name,
            "description": f"Rules of shardwise. {_about(package)}",
            "dependencies": [f"shardwise-core{exactly}"],
            "entry-points": {GROUP: {name: module}},
        }
        made[name] = _pyproject(root, family, [package])
    whole = {
        **shared,
        "name": "shardwise",
        "description": project["description"],
        "dependencies": [f"{name}{exactly}" for name in made],
        "optional-dependencies": test,
    }
    return {**made, "shardwise": _pyproject(root, whole, [])}


def _pyproject(root: Mapping[str, Any], project: Project, packages: list[str]) -> Project:
    # A wheel without a file needs to say that this is meant.
    files = {"packages": packages} if packages else {"bypass-selection": True}
    # The folder lies outside the repository, or in a part of it that git ignores.
    hatch = {"build": {"ignore-vcs": True, "targets": {"wheel": files}}}
    return {"build-system": root["build-system"], "project": project, "tool": {"hatch": hatch}}


def _about(package: str) -> str:
    """The first sentence of a package's docstring."""
    tree = ast.parse((ROOT / "plugins" / package / "__init__.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").partition("\n")[0]


# -- folders ---------------------------------------------------------------------------------------------------------


def write(folder: Path, content: Project) -> None:
    """Write what hatchling builds a distribution from."""
    folder.mkdir(parents=True)
    tables = [("build-system", content["build-system"]), ("project", content["project"])]
    tables.append(("tool.hatch.build", content["tool"]["hatch"]["build"]))
    text = "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in t.items()) for name, t in tables
    )
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", folder)
    project = content["project"]
    (folder / "README.md").write_text(readme(project), encoding="utf-8")
    for package in content["tool"]["hatch"]["build"]["targets"]["wheel"].get("packages", ()):
        source = ROOT / ("core" if package == "shardwise" else "plugins") / package
        shutil.copytree(source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def readme(project: Project) -> str:
    """The page of a distribution on an index."""
    name = project["name"]
    if name == "shardwise":
        return (ROOT / "README.md").read_text(encoding="utf-8")
    home = "https://pypi.org/project/shardwise/"
    return f"""# {name}

{project["description"]}

A part of [shardwise]({home}), which requires all parts. Install a part by itself to have its operators alone: an
operator of a part that is not installed has no rule.
"""


def toml(value: Any) -> str:
    """A value as TOML has it: its strings and lists are those of JSON."""
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


# -- building --------------------------------------------------------------------------------------------------------


def build(out: Path, names: Iterable[str] = (), *, sources: bool = False) -> Iterator[Path]:
    """Build the distributions into a folder, and yield the paths of their wheels and, if asked for, sources."""
    from hatchling.build import build_sdist, build_wheel

    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    known = projects()
    for name in names or known:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / name
            write(folder, known[name])
            with chdir(folder):
                if sources:
                    yield out / build_sdist(str(out))
                yield out / build_wheel(str(out))


def main() -> None:
    """Build what the command line names, or everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", choices=[[], *projects()], metavar="NAME")
    parser.add_argument("--sources", action="store_true", help="source distributions, too")
    given = parser.parse_args()
    for path in build(given.folder, given.names, sources=given.sources):
        sys.stdout.write(f"{os.path.relpath(path)}  {path.stat().st_size / 1024:.0f} KiB\n")


if __name__ == "__main__":
    main()
