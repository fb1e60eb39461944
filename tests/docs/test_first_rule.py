"""The tutorial, done as its reader does: in a fresh virtual environment, block by block."""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "first-rule.md"


def _installed():
    spec = importlib.util.spec_from_file_location("installed", PAGE.parents[1] / "tests" / "installed" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def environment(tmp_path):
    """A fresh environment with shardwise, and the commands that a reader has in one."""
    installed = _installed()
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run([*command, str(tmp_path), str(installed.ROOT)], check=True)
    env = installed.Environment(tmp_path / "env").install(*tmp_path.glob("shardwise-*.whl"))
    for name, module in {"pip": "pip", "pytest": "pytest", "torchrun": "torch.distributed.run"}.items():
        script = env.folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{env.python}" -m {module} "$@"\n')
        script.chmod(0o755)
    return env


@pytest.mark.slow
@pytest.mark.sample
def test_the_tutorial_as_its_reader_does_it(environment, docs):
    # Nothing is downloaded: what a build and the tests need lies in the environment.
    settings = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environ = environment.environ(**settings)
    environ["PATH"] = f"{environment.folder / 'bin'}{os.pathsep}{environ['PATH']}"
    folder, done = environment.cwd, 0
    for block in docs.blocks(PAGE):
        if block.how.startswith("file: "):
            (folder / block.how.removeprefix("file: ")).write_text(block.text)
        elif block.how.startswith("in an environment"):
            for command in [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]:
                if command.startswith("cd "):
                    folder = folder / command.removeprefix("cd ")
                    continue
                ran = subprocess.run(
                    shlex.split(command),
                    cwd=folder,
                    env=environ,
                    capture_output=True,
                    text=True,
                    timeout=200,
                    check=False,
                )
                said = f"{command}\n{ran.stdout}\n{ran.stderr}"
                assert (ran.returncode != 0) == ("fails" in block.how), said
                print(said)  # a transcript for who runs it with -s
                done += 1
    assert done == 11
