"""``shardwise new``: a plugin to start from, complete and tested."""

from __future__ import annotations

import importlib.util
import keyword
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template

import click
from packaging.version import Version

from shardwise.kernel.first_party import core_version
from shardwise.kernel.foreign_files import reason
from shardwise.settings import normalised

__all__ = ["FILES", "bounds", "new"]

# A distribution's name as PEP 508 has it.
_NAME = re.compile(r"[A-Z0-9]([A-Z0-9._-]*[A-Z0-9])?", re.IGNORECASE)

# Op namespaces that torch has, each of which would be a package's name.
_TORCHS = (
    *("aten", "c10d", "debugprims", "fsdp", "higher_order", "inductor", "mkl", "mkldnn", "onednn", "prepacked", "prim"),
    *("prims", "profiler", "quantized", "quantized_decomposed", "rngprims", "sparse", "static_runtime", "streams"),
    *("symm_mem", "xpu"),
)

FILES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "LICENSE": "LICENSE",
    ".gitignore": "gitignore",
    ".github/workflows/ci.yml": "ci.yml",
    "src/{package}/__init__.py": "init.py",
    "src/{package}/ops.py": "ops.py",
    "src/{package}/rules.py": "rules.py",
    "src/{package}/plugin.py": "plugin.py",
    "src/{package}/samples.py": "samples.py",
    "src/{package}/py.typed": None,
    "tests/conftest.py": "conftest.py",
    "tests/test_rules.py": "test_rules.py",
    "tests/test_mesh.py": "test_mesh.py",
    "tests/test_plugin.py": "test_plugin.py",
}
"""The files of a new distribution, and the template of each (None: an empty file)."""


@click.command()
@click.argument("name")
@click.option(
    "--path",
    "parent",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    show_default="here",
    help="The folder to make it in.",
)
@click.option("--author", help="For the metadata and the LICENSE.  [default: git's user.name]")
def new(*, name: str, parent: Path, author: str | None) -> None:
    """Make a plugin to start from: the distribution NAME, with a custom op, its rules, and tests that pass at once.

    The folder is called NAME and must not exist. The licence is BSD-3-Clause; change it as you like.
    """
    name, package = _checked_names(name)
    folder = parent / name
    values = {
        "name": name,
        "package": package,
        "bounds": bounds(core_version()),
        "author": " ".join(
            (author or _git_user() or f"The {name} authors").replace("\\", " ").replace('"', "'").split()
        ),
        "year": str(datetime.now(UTC).year),
    }
    templates = files("shardwise.cli") / "template"
    try:
        folder.mkdir(parents=True)
        with _whole(folder):
            for file, template in FILES.items():
                path = folder / file.format(**values)
                path.parent.mkdir(parents=True, exist_ok=True)
                text = "" if template is None else (templates / f"{template}.tmpl").read_text(encoding="utf-8")
                path.write_text(Template(text).substitute(values), encoding="utf-8")
    except FileExistsError as error:
        raise click.ClickException(f"{folder} exists already; name another, or move it away") from error
    except OSError as error:
        raise click.ClickException(f"cannot write {folder}: {reason(error)}") from error
    click.echo(f"made {folder}:")
    for file in FILES:
        click.echo(f"  {file.format(**values)}")
    click.echo(f"\nnext:\n  cd {folder}\n  pip install -e '.[test]'\n  pytest\n  shardwise plugins check .")


@contextmanager
def _whole(folder: Path) -> Iterator[None]:
    """Remove a folder that was made for the block, where the block does not end well: half a plugin is not one."""
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _checked_names(name: str) -> tuple[str, str]:
    """The normalised name of the distribution, and that of the package. Refuses a name that cannot be one."""
    if not _NAME.fullmatch(name):
        raise click.UsageError(f"{name!r} is not the name of a distribution: letters, digits and inner . _ - (PEP 508)")
    name = normalised(name)
    package = name.replace("-", "_")
    if not package.isidentifier() or keyword.iskeyword(package) or keyword.issoftkeyword(package):
        raise click.UsageError(f"{name!r} makes no package: {package!r} cannot be imported; choose another name")
    if package in _TORCHS:
        raise click.UsageError(
            f"torch has the op namespace {package} itself; choose a name of your own, as in acme-{name}"
        )
    # Python takes any folder without __init__.py for a package, also one of the working directory: it has no origin.
    spec = importlib.util.find_spec(package)
    if package in sys.stdlib_module_names or (spec is not None and spec.origin is not None):
        raise click.UsageError(f"there is a module {package} already; choose a name of your own, as in acme-{name}")
    return name, package


def bounds(have: str) -> str:
    """The versions of shardwise that a plugin written for ``have`` asks for: up to the next that may break it.

    That is the next major version, and before 1.0 the next minor one.
    """
    at = Version(have)
    after = f"{at.major + 1}" if at.major else f"0.{at.minor + 1}"
    return f">={at.public},<{after}"


def _git_user() -> str:
    try:
        done = subprocess.run(["git", "config", "user.name"], capture_output=True, text=True, timeout=10, check=False)  # noqa: S607  git is found on the path, as a person finds it
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
