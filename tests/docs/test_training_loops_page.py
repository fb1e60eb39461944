"""The page on training loops of other packages: its program, where the package is."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from zoo_packages import installed, recipes_of


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.zoo
def test_its_program_runs(docs, pool, tmp_path):
    if "transformers" not in installed() or find_spec("accelerate") is None:
        pytest.skip("needs the extra shardwise[zoo]")
    page = docs.ROOT / "docs" / "cookbook" / "training-loops.md"
    (program,) = [block.text for block in docs.blocks(page) if block.how == "on 4 ranks"]
    # The import alone may take a minute on a busy machine.
    assert pool.run(run_program, program, str(tmp_path), timeout=240) == [4] * 4


def run_program(text, folder):
    recipes_of("transformers")  # which imports it, also beside a torchvision whose kernels do not load
    before, environment = Path.cwd(), dict(os.environ)
    os.chdir(folder)  # the page's folder of checkpoints is relative
    try:
        names = {"__name__": "page"}
        exec(compile(text, "page", "exec"), names)  # noqa: S102  # the text under test
        return names["resumed"].state.global_step
    finally:
        os.chdir(before)
        os.environ.update(environment)
