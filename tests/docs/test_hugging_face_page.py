"""The page on a model of transformers: its program, where the package is."""

import pytest
from zoo_packages import installed, recipes_of


@pytest.mark.slow
@pytest.mark.zoo
def test_its_program_runs(docs, pool):
    if "transformers" not in installed():
        pytest.skip("needs the extra shardwise[zoo]")
    page = docs.ROOT / "docs" / "cookbook" / "hugging-face.md"
    (program,) = [block.text for block in docs.blocks(page) if block.how == "on 4 ranks"]
    pool.run(run_program, program, timeout=240)  # the import alone may take a minute on a busy machine


def run_program(text):
    recipes_of("transformers")  # which imports it, also beside a torchvision whose kernels do not load
    exec(compile(text, "page", "exec"), {"__name__": "page"})  # noqa: S102  # the text under test
