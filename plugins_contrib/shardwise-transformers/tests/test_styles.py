"""Every style of transformers is known, and places parameters as transformers places them."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.distributed import expert_parallel, tensor_parallel  # each registers its styles

from shardwise.testing import mesh as mesh_of
from shardwise_transformers.styles import PLACES

STYLES = tensor_parallel.ALL_PARALLEL_STYLES


def test_every_style_is_known():
    assert expert_parallel.ALL_PARALLEL_STYLES is STYLES
    assert set(STYLES) == set(PLACES)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(4, 16, 8))
        self.down_proj = nn.Parameter(torch.empty(4, 8, 8))
        self.sinks = nn.Parameter(torch.empty(8))


MODULES = {"linear": lambda: nn.Linear(8, 8), "embedding": lambda: nn.Embedding(8, 8), "experts": Experts}


def placements_by_both(style, kind):
    """By name: what transformers makes of each parameter, and what is read from the style."""
    styles = {**expert_parallel.ALL_PARALLEL_STYLES, **tensor_parallel.ALL_PARALLEL_STYLES}
    mesh = mesh_of((4,))
    module = MODULES[kind]()
    found = {}
    for name, parameter in list(module.named_parameters()):
        if style.startswith("embedding") and parameter.ndim == 1:
            continue
        styles[style].shard_param(module, name, mesh)
        theirs = module._parameters[name]
        theirs = theirs.placements[0] if isinstance(theirs, DTensor) else None
        found[name] = repr(theirs), repr(PLACES[style](name, parameter.ndim)), parameter.ndim
    return found


@pytest.mark.parametrize("kind", MODULES)
def test_it_places_as_transformers_does(ranks, kind):
    for style in PLACES:
        (found, *_) = ranks.run(placements_by_both, style, kind)
        for name, (theirs, ours, ndim) in found.items():
            if style == "packed_colwise" and ndim == 1:
                continue  # its two halves are cut here as those of the weight are
            assert ours == ("Replicate()" if theirs == "None" else theirs), (style, name)
