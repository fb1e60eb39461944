"""Files of a model: the bytes of one device, read by ``from_pretrained``."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

import shardwise as sw
import shardwise_transformers as st
from architectures import batch, make
from shardwise import Shard
from shardwise.testing import mesh as mesh_of


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def saved(name, folder, options):
    one, model = make(name), make(name)
    sw.distribute_module(model, mesh_of((4,)), {"*.weight": [Shard(0)]})  # some sizes are uneven
    if dist.get_rank() == 0:
        one.save_pretrained(f"{folder}/one", **options)
    st.save(model, f"{folder}/mesh", **options)
    dist.barrier()
    assert bytes_of(f"{folder}/mesh") == bytes_of(f"{folder}/one")
    again = type(one).from_pretrained(f"{folder}/mesh")
    assert isinstance(again, transformers.PreTrainedModel)
    again.config._experts_implementation = "eager"  # the grouped product takes no float64
    on = mesh_of((2, 2), ("dp", "tp"))
    placed = st.distribute(again, on)
    with torch.no_grad():
        expected = one.eval()(**batch()).logits
        found = placed.eval()(**st.place_batch(batch(), on)).logits
    torch.testing.assert_close(found.full_tensor(), expected, rtol=3e-5, atol=1e-5)  # norms are in float32


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "20KB"}], ids=["one file", "several"])
@pytest.mark.parametrize("name", ["Llama", "Gemma", "Mixtral"])  # Gemma's embedding is tied to its head
def test_the_bytes_are_those_of_one_device(ranks, tmp_path, name, options):
    ranks.run(saved, name, str(tmp_path), options, timeout=120)
