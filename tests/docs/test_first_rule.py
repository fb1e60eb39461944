"""The tutorial, done as its reader does: in a fresh virtual environment, block by block."""

import shlex
import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "first-rule.md"
COMMANDS = 10


@pytest.mark.slow
def test_the_tutorial_as_its_reader_does_it(environment, docs):
    env = environment().add_commands()
    folder, done = env.cwd, 0
    for block in docs.blocks(PAGE):
        if block.how.startswith("file: "):
            (folder / block.how.removeprefix("file: ")).write_text(block.text)
        elif block.how.startswith("in an environment"):
            for command in [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]:
                if command.startswith("cd "):
                    folder = folder / command.removeprefix("cd ")
                    continue
                start = time.monotonic()
                ran = env.call(*shlex.split(command), cwd=folder)
                said = f"$ {command}\n{ran.stdout}{ran.stderr}[{time.monotonic() - start:.1f} s]\n"
                assert (ran.returncode != 0) == ("fails" in block.how), said
                print(said)  # a transcript for who runs it with -s
                done += 1
    assert done == COMMANDS
