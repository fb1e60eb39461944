"""The page on a model of transformers: its program, where the package is."""

import sys

import pytest
from zoo_packages import installed, recipes_of

PACKAGE = "plugins_contrib/shardwise-transformers/src"


@pytest.mark.slow
@pytest.mark.zoo
def test_its_program_runs(docs, pool):
    if "transformers" not in installed():
        pytest.skip("needs the extra shardwise[zoo]")
    page = docs.ROOT / "docs" / "cookbook" / "hugging-face.md"
    (program,) = [block.text for block in docs.blocks(page) if block.how == "on 4 ranks"]
    # The import alone may take a minute on a busy machine.
    pool.run(run_program, program, str(docs.ROOT / PACKAGE), timeout=240)


def run_program(text, package):
    sys.path.insert(0, package)  # a checkout has it without installing it
    recipes_of("transformers")  # which imports it, also beside a torchvision whose kernels do not load
    exec(compile(text, "page", "exec"), {"__name__": "page"})  # noqa: S102  # the text under test
