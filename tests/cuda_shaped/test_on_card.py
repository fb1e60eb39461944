"""On a card: that the stand-in says what the card says, and a world of one with NCCL."""

import pytest
import torch
from shaped_programs import PROGRAMS, WARM, distributed
from torch.nn import functional

from shardwise.private_torch.absent_card import Card
from shardwise.private_torch.cuda_choices import _Attention
from shardwise.testing import mesh

pytestmark = pytest.mark.cuda

ALONE = ("language bfloat16", "language autocast", "convolutions", "experts", "lstm")


def calls():
    """Calls of attention: query, key, value, mask, dropout, causal, grouped."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for width in (30, 64, 192, 256):
            for heads, lengths in (((4, 4), (128, 128)), ((4, 2), (128, 128)), ((4, 4), (64, 128))):
                query = torch.rand(2, heads[0], lengths[0], width, dtype=dtype, device="cuda", requires_grad=True)
                key, value = (
                    torch.rand(2, heads[1], lengths[1], width, dtype=dtype, device="cuda", requires_grad=True)
                    for _ in range(2)
                )
                masks = (None, torch.zeros(lengths, dtype=dtype, device="cuda"))
                for mask in masks:
                    for dropout in (0.0, 0.1, 0.125):
                        for causal in (False, True) if mask is None else (False,):
                            yield query, key, value, mask, dropout, causal, heads[0] != heads[1]


def test_the_stand_in_chooses_as_the_card_does():
    card = Card(capability=torch.cuda.get_device_capability(), cudnn=torch.backends.cudnn.version() or 0)
    wrong = []
    for *tensors, mask, dropout, causal, grouped in calls():
        chosen = torch.ops.aten._fused_sdp_choice(*tensors, mask, dropout, causal, enable_gqa=grouped)
        expected = _Attention(card).backend(*tensors, mask, dropout, causal, grouped)
        if chosen != expected:
            wrong.append((tensors[0].dtype, tensors[0].shape, tensors[1].shape, dropout, causal, chosen, expected))
    assert not wrong, f"on {torch.cuda.get_device_name()}: {wrong[:20]}"


@pytest.fixture
def alone(pool_of):
    """One rank with NCCL."""
    return pool_of(1, "nccl")


def trains_without_a_wait(name):
    make, inputs, optimizer_of, dtype = PROGRAMS[name]
    here = mesh((1,), device_type="cuda")
    with torch.device("cuda"):
        model, x = distributed(make(), here), inputs(here)
    optimizer = optimizer_of(model.parameters())

    def step():
        with torch.autocast("cuda", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for _ in range(WARM):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.full_tensor().isfinite()


@pytest.mark.parametrize("name", ALONE)
def test_a_warm_step_of_a_world_of_one_waits_nowhere(alone, name):
    alone.run(trains_without_a_wait, name)


def replays():
    from shardwise import MeshTensor, Replicate

    here = mesh((1,), device_type="cuda")
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, device="cuda")
    plain = torch.nn.Linear(8, 8, device="cuda")
    plain.load_state_dict(layer.state_dict())
    distributed(layer, here)
    static = torch.rand(4, 8, device="cuda")

    def loss_of(model, x):
        return functional.gelu(model(x)).square().sum()

    x = MeshTensor.from_local(static, here, [Replicate()])
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(WARM + 1):
            loss_of(layer, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = loss_of(layer, x)
    for seed in range(3):
        torch.manual_seed(seed)
        static.copy_(torch.rand(4, 8))
        graph.replay()
        torch.testing.assert_close(captured.to_local(), loss_of(plain, static))


def test_a_captured_step_gives_what_an_eager_one_gives(alone):
    alone.run(replays)
