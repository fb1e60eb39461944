"""The page on learning: what the step of its first paragraph sends."""

import re
import sys

import pytest

import shardwise as sw
from shardwise import Replicate
from shardwise.tools.rehearse import rehearse


@pytest.fixture
def gpt(docs, monkeypatch):
    """The model and the layouts of the benchmarks."""
    monkeypatch.syspath_prepend(str(docs.ROOT / "tests" / "benchmarks"))
    import gpt

    yield gpt
    for name in ("gpt", "measuring"):
        sys.modules.pop(name, None)


def test_the_collectives_of_a_step_are_those_that_are_sent(docs, gpt):
    def count(layout):
        def step(mesh):
            settings = gpt.gpt_settings()
            model = gpt.mesh_model(settings, mesh, layout)
            batch = [sw.distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in gpt.batch(settings)]
            gpt.training_step(model, *batch, settings)()

        return str(sum(times for _, times, _ in rehearse(step, (4,), ("tp",)).collectives))

    page = (docs.ROOT / "docs" / "learn.md").read_text()
    said = re.search(r"sends (\d+) collectives on four ranks; the same step written by hand\s+sends (\d+)", page)
    assert said is not None
    assert (count(gpt.FREE), count(gpt.PINNED)) == said.groups()
