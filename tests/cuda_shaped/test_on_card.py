"""On a card: that the stand-in says what the card says, and a world of one with NCCL."""

import pytest
import torch
from shaped_programs import PROGRAMS, WARM, ConvNet, Experts, Language, Recurrent, distributed
from torch.nn import functional

import shardwise as sw
from shardwise import Replicate
from shardwise.errors import LayoutError
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
    here = mesh((1,), device_type="cuda")
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8, device="cuda")
    plain = torch.nn.Linear(8, 8, device="cuda")
    plain.load_state_dict(layer.state_dict())
    distributed(layer, here)
    static = torch.rand(4, 8, device="cuda")

    def loss_of(model, x):
        return functional.gelu(model(x)).square().sum()

    x = sw.MeshTensor.from_local(static, here, [Replicate()])
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


def test_a_captured_forward_pass_gives_what_an_eager_one_gives(alone):
    alone.run(replays)


# Models of cuDNN's kernels are in float64, as AdamW turns a rounding of a gradient near zero into a step.
MODELS = {
    "language": (Language, (16, 8), torch.int64),
    "dropout": (lambda: Language(0.1), (16, 8), torch.int64),
    "convolutions": (lambda: ConvNet().double(), (16, 3, 16, 16), torch.float64),
    "lstm": (lambda: Recurrent("LSTM").double(), (16, 5, 8), torch.float64),
    "experts": (lambda: Experts().double(), (16, 16), torch.float64),
}
CAPTURABLE = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True, capturable=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9, foreach=True),
}


def drawn(shape, dtype):
    return (
        torch.randint(96, shape, device="cuda")
        if dtype == torch.int64
        else torch.rand(shape, dtype=dtype, device="cuda")
    )


def with_a_batch(here, placements, name):
    """A model on the card and a batch, on a mesh if there is one."""
    make, shape, dtype = MODELS[name]
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = make()
    batch = drawn(shape, dtype)
    if here is None:
        return model, batch
    return distributed(model, here), sw.distribute_tensor(batch, here, placements)


def warm_steps(step):
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM + 2):
            step()
    torch.cuda.current_stream().wait_stream(side)


def trained(here, name, optimizer_of, *, captures):
    """Losses and parameters of warm steps on one batch and of three on others, which a graph may run."""
    model, static = with_a_batch(here, [Replicate()], name)
    optimizer = optimizer_of(model.parameters())

    def step():
        loss = model(static)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss.detach()

    torch.cuda.manual_seed(7)
    warm_steps(step)
    if captures:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()

        def step():
            graph.replay()
            return loss

    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        batch = drawn(*MODELS[name][1:])
        torch.cuda.manual_seed(7 + seed)
        static.copy_(batch if here is None else sw.distribute_tensor(batch, here, [Replicate()]))
        losses.append(float(step()))
    return losses, [p.full_tensor() if here is not None else p.detach() for p in model.state_dict().values()]


def compare_captured(name, optimizer):
    found = trained(mesh((1,), device_type="cuda"), name, CAPTURABLE[optimizer], captures=True)
    expected = trained(None, name, CAPTURABLE[optimizer], captures=True)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    if name != "dropout":  # a graph draws from where its capture began
        eager = trained(None, name, CAPTURABLE[optimizer], captures=False)
        torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", CAPTURABLE)
@pytest.mark.parametrize("name", MODELS)
def test_captured_training_gives_the_numbers_of_one_device(alone, name, optimizer):
    """Forward, backward, clipping and the optimizer's step in one graph."""
    alone.run(compare_captured, name, optimizer)


def graphed_callable():
    here = mesh((1,), device_type="cuda")
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).cuda()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).cuda()
    model.load_state_dict(plain.state_dict())
    distributed(model, here)
    sample = sw.distribute_tensor(torch.rand(4, 8, device="cuda"), here, [Replicate()]).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.rand(4, 8, device="cuda", requires_grad=True)
        placed = sw.distribute_tensor(x.detach(), here, [Replicate()]).requires_grad_()
        found, expected = graphed(placed), plain(x)
        torch.testing.assert_close(found.full_tensor(), expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(placed.grad.full_tensor(), x.grad)
    gradients = [p.grad.full_tensor() for p in model.parameters()]
    torch.testing.assert_close(gradients, [p.grad for p in plain.parameters()])


def test_a_graphed_callable_gets_the_operands_of_each_call(alone):
    alone.run(graphed_callable)


COMPILED = ("language", "convolutions", "experts")


def compiled_losses(here, placements, name):
    model, x = with_a_batch(here, placements, name)
    if here is not None:
        model.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    losses = []
    for _ in range(3):
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return losses


def compare_compiled(ranks, placements, name):
    expected = compiled_losses(None, None, name)
    found = compiled_losses(mesh((ranks,), device_type="cuda"), placements, name)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_training_gives_the_numbers_of_one_device(alone, name):
    alone.run(compare_compiled, 1, [Replicate()], name)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_training_on_ranks_that_share_a_card(pool_of, name):
    pool_of(2, "gloo").run(compare_compiled, 2, [sw.Shard(0)], name)


def launches():
    from triton_kernel import doubled

    here = mesh((1,), device_type="cuda")
    x = sw.distribute_tensor(torch.arange(8.0, device="cuda"), here, [sw.Shard(0)])
    for operands in ((x, torch.empty(8, device="cuda")), (torch.empty(8, device="cuda"), x)):
        with pytest.raises(LayoutError, match=r"run a Triton kernel on .* to_local\(\)"):
            doubled[(1,)](*operands, 8, 8)
    out = torch.empty(8, device="cuda")
    doubled[(1,)](x.to_local(), out, 8, 8)
    torch.testing.assert_close(out, 2 * torch.arange(8.0, device="cuda"))


def test_a_triton_kernel_does_not_run_on_a_tensor_without_memory(alone):
    """It would read at address 0, and the card would do nothing more for the process."""
    pytest.importorskip("triton")
    alone.run(launches)
