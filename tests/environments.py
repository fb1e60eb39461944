"""Distributions for tests: small wheels, and fresh virtual environments that pip installs them into.

The packages that shardwise depends on are links to those of the environment that the tests run in, so that no test
downloads torch. shardwise itself is built from the checkout as a wheel and installed by pip like the rest.
"""

import base64
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUP = "shardwise.plugins.v1"
RULE = """
    import torch
    from shardwise.hookspecs import hookimpl
    from shardwise.rule import rule

    RULE = rule(torch.ops.aten.{op}.default, "{notation}"{options})

    @hookimpl
    def shardwise_register(registry):
        registry.add(RULE)
"""


def source_of(op="_copy_from_and_resize", notation="R, R -> R", options=""):
    """The source of a plugin with one rule; no first-party plugin has one for _copy_from_and_resize."""
    return RULE.format(op=op, notation=notation, options=options and f", {options}")


def make_wheel(
    folder,
    name,
    source=None,
    *,
    version="1.0",
    group=GROUP,
    requires=("shardwise",),
    module=None,
    entries=None,
    extra=(),
    about=(),
):
    """Write a wheel: one module, its metadata and entry points, and the RECORD that pip wants. Returns its path."""
    plain = name.replace("-", "_")
    module = module or f"{plain}_plugin"
    info = f"{plain}-{version}.dist-info"
    if entries is None:
        entries = {group: {name: module}}
    files = {
        f"{module}.py": textwrap.dedent(source_of() if source is None else source),
        **{path: textwrap.dedent(text) for path, text in extra},
        f"{info}/METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                f"Version: {version}",
                *(f"Requires-Dist: {r}" for r in requires),
                *about,
            ]
        )
        + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "".join(
            f"[{g}]\n" + "".join(f"{key} = {value}\n" for key, value in lines.items()) for g, lines in entries.items()
        ),
    }
    record = "".join(f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in files.items())
    built = Path(folder) / f"{plain}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(built, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return built


def _digest(text):
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def clean_environ(**settings):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SHARDWISE_", "PYTHON", "VIRTUAL_ENV"))}
    return {**kept, "SHARDWISE_LINKS": "off", "OMP_NUM_THREADS": "1", **settings}


class Environment:
    """A fresh virtual environment. ``run`` starts its Python in an empty folder of its own."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.python = self.folder / "bin" / "python"
        self.cwd = self.folder / "cwd"
        venv.create(self.folder, with_pip=False, symlinks=True)
        self.site = Path(sysconfig.get_path("purelib", vars={"base": str(self.folder), "platbase": str(self.folder)}))
        self.cwd.mkdir()
        # pip must not exchange what is a link: it would exchange the package of the environment that the tests run in.
        self.pins = self.folder / "pins.txt"
        self.pins.write_text(f"torch=={version('torch')}\n")
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            # Neither shardwise, nor the hooks by which this environment may have it in editable form.
            if "shardwise" not in entry.name and entry.suffix != ".pth" and not (self.site / entry.name).exists():
                (self.site / entry.name).symlink_to(entry)

    def install(self, *wheels):
        """Install wheels with pip, which checks what they require; nothing comes from an index."""
        command = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-index"]
        done = subprocess.run(
            [*command, "--no-compile", *map(str, wheels)],
            env=clean_environ(PIP_CONSTRAINT=str(self.pins)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return self

    def add_commands(self):
        """Give it the commands that a reader of the documentation has beside ``shardwise``."""
        for name, module in {"pip": "pip", "pytest": "pytest", "torchrun": "torch.distributed.run"}.items():
            script = self.folder / "bin" / name
            script.write_text(f'#!/bin/sh\nexec "{self.python}" -m {module} "$@"\n')
            script.chmod(0o755)
        return self

    def call(self, *command, cwd=None, timeout=200):
        """Run a command as a person does in it. What a build needs lies in the environment: nothing is downloaded."""
        settings = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        environ = self.environ(PIP_CONSTRAINT=str(self.pins), **settings)
        return subprocess.run(
            command,
            cwd=cwd or self.cwd,
            env=environ | {"PATH": f"{self.folder / 'bin'}{os.pathsep}{environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def command(self, code):
        return [str(self.python), "-c", textwrap.dedent(code)]

    def environ(self, **settings):
        return clean_environ(**settings)

    def run(self, code, *, timeout=120, cwd=None, **settings):
        return subprocess.run(
            self.command(code),
            env=clean_environ(**settings),
            cwd=cwd or self.cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def answer(self, code, **options):
        """What the code prints last, read as JSON; it must end well."""
        done = self.run(code, **options)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def shardwise_wheel(tmp_path_factory):
    """shardwise of this checkout, built as a release is."""
    folder = tmp_path_factory.mktemp("shardwise-wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(folder), str(ROOT)], check=True, env=clean_environ())
    (built,) = folder.glob("shardwise-*.whl")
    return built


@pytest.fixture(scope="session")
def distributions(tmp_path_factory):
    """The wheels of a release: core, each family, and shardwise, which requires them all."""
    from distributions import build

    return tuple(build(tmp_path_factory.mktemp("distributions")))


@pytest.fixture
def wheel(tmp_path):
    """``wheel(name, source, ...)`` writes a wheel with one plugin; see :func:`make_wheel`."""
    return lambda *args, **options: make_wheel(tmp_path, *args, **options)


@pytest.fixture
def environment(tmp_path_factory, shardwise_wheel):
    """``environment(*wheels)``: a fresh virtual environment with shardwise and these wheels installed."""
    return lambda *wheels: Environment(tmp_path_factory.mktemp("environment") / "env").install(shardwise_wheel, *wheels)


@pytest.fixture(scope="session")
def installed():
    """This module, for tests that write their own wheels and environments."""
    return sys.modules[__name__]
