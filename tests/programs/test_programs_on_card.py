"""Programs on ranks that share a card, against one device, which is that card."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional
from whole_programs import PROGRAMS, Setting, results

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import mesh

pytestmark = pytest.mark.cuda

LAYOUTS = {"tensor": [Replicate(), Shard(0)], "data": [Shard(0), Replicate()], "both": [Shard(0), Shard(0)]}


@pytest.fixture
def sharing(pool_of):
    """Four ranks on one card, through gloo."""
    return pool_of(4, "gloo")


def whole(values):
    return [v.full_tensor() if isinstance(v, sw.MeshTensor) else v for v in values]


def compare_program(name, layout):
    with torch.device("cuda"):
        expected = results(PROGRAMS[name], Setting())
        found = results(PROGRAMS[name], Setting(mesh((2, 2), device_type="cuda"), layout))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("layout", ["by column and row", "every one over all ranks"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_whole_program_gives_the_numbers_of_one_device(sharing, name, layout):
    sharing.run(compare_program, name, layout)


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))


def scaled_steps(here, placements, dtype):
    """Losses and parameters after some steps under autocast with a scaler, of which the second step overflows."""
    with torch.device("cuda"):
        model, x = make(), torch.randn(8, 16)
        if here is not None:
            sw.distribute_module(model, here, {"*.weight": placements} if placements != LAYOUTS["data"] else {})
            x = sw.distribute_tensor(x, here, [Shard(0), Replicate()])
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
        told = []
        for step in range(4):
            with torch.autocast("cuda", dtype):
                loss = model(x * 1e30 if step == 1 else x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            told.append(loss.detach())
        return whole([*told, *model.state_dict().values()]), scaler.get_scale()


def compare_scaled(layout, dtype):
    expected, scale = scaled_steps(None, None, dtype)
    found, mine = scaled_steps(mesh((2, 2), device_type="cuda"), LAYOUTS[layout], dtype)
    assert mine == scale == 2.0**7
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scaled_steps_are_those_of_one_device(sharing, layout, dtype):
    sharing.run(compare_scaled, layout, dtype)


def draw(here):
    with torch.device("cuda"):
        x = torch.ones(8, 6)
        x = x if here is None else sw.distribute_tensor(x, here, [Shard(0), Shard(1)])
        torch.manual_seed(3)
        drawn = [
            functional.dropout(x, 0.5),
            torch.rand_like(x),
            torch.empty_like(x).normal_(),
            torch.bernoulli(x * 0.5),
        ]
        return whole(drawn)


def compare_draws():
    torch.testing.assert_close(draw(mesh((2, 2), device_type="cuda")), draw(None), rtol=0, atol=0)


def test_random_numbers_are_those_of_one_device(sharing):
    sharing.run(compare_draws)


def save_and_load(folder):
    here = mesh((2, 2), device_type="cuda")
    with torch.device("cuda"):
        model, other, single = make(), make(), make()
        sw.distribute_module(model, here, {"*.weight": LAYOUTS["tensor"]})
        sw.distribute_module(other, here, {"*.weight": LAYOUTS["both"]})
    with torch.no_grad():
        for p in (*other.parameters(), *single.parameters()):
            p.zero_()
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    for target in (other, single):
        state = {"model": target.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        target.load_state_dict(state["model"])
        for (name, a), b in zip(target.state_dict().items(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(*whole([a, b]), rtol=0, atol=0, msg=name)


def test_a_checkpoint_is_loaded_in_another_layout(sharing, tmp_path):
    sharing.run(save_and_load, str(tmp_path / "saved"))


def host_tensors():
    here = mesh((2, 2), device_type="cuda")
    batch = torch.arange(48.0).reshape(8, 6)  # on the host, as a data loader gives it
    x = sw.distribute_tensor(batch, here, [Shard(0), Shard(1)])
    assert x.to_local().is_cuda
    rows, mask = torch.tensor([0, 5, -1]), batch[:, 0] > 10
    torch.testing.assert_close(x[rows].full_tensor().cpu(), batch[rows])
    torch.testing.assert_close(x[:, rows[:2]].full_tensor().cpu(), batch[:, rows[:2]])
    torch.testing.assert_close(x[mask].full_tensor().cpu(), batch[mask])
    x[rows] = 2.0
    batch[rows] = 2.0
    torch.testing.assert_close(x.full_tensor().cpu(), batch)
    model = make()
    sw.distribute_module(model, here, {"*.weight": LAYOUTS["tensor"]})
    assert {p.to_local().device.type for p in model.parameters()} == {"cuda"}
    one = torch.tensor([0])
    for name in ("index_select", "gather"):  # of one row
        assert getattr(x[:1, :1], name)(0, one.cuda() if name == "index_select" else one.cuda()[:, None]).item() == 2
    assert x.flatten().quantile(0.5).item() == batch.flatten().quantile(0.5).item()


def test_tensors_of_the_host_are_taken(sharing):
    sharing.run(host_tensors)


def empty_parts_of_a_batch():
    """Batches of one, which some ranks have nothing of, so that kernels meet tensors without elements."""
    from torch.testing import assert_close

    here = mesh((4,), device_type="cuda")
    torch.manual_seed(0)
    plain = [torch.randn(1, rows, 5, device="cuda", requires_grad=True) for rows in (4, 6)]
    placed = [sw.distribute_tensor(x.detach(), here, [Shard(0)]).requires_grad_() for x in plain]
    for p in (1.0, 2.0, 3.0):
        for operands in (plain, placed):
            torch.cdist(*operands, p=p).square().sum().backward()
    assert_close([x.grad.full_tensor() for x in placed], [x.grad for x in plain])


def test_distances_of_a_batch_that_some_ranks_have_nothing_of(sharing):
    sharing.run(empty_parts_of_a_batch)
