"""Modules on a mesh and what torch makes graphs of: ``torch.export``, ``torch.jit.trace`` and ``torch.jit.script``."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.distributed as dist
from exported_models import Scored
from torch import nn

import shardwise as sw
from shardwise import Shard
from shardwise.errors import ArgumentError, LayoutError
from shardwise.testing import mesh


def made():
    torch.manual_seed(0)
    model, x = Scored(), torch.randn(6, 6)
    placed = sw.distribute_module(copy.deepcopy(model), mesh((dist.get_world_size(),)), {"proj.*": [Shard(0)]})
    return model, x, placed, sw.distribute_tensor(x, mesh((dist.get_world_size(),)), [Shard(0)])


def exported(strict):
    warnings.simplefilter("ignore")
    model, x, placed, on_mesh = made()
    program = torch.export.export(placed, (on_mesh,), strict=strict)
    out = program.module()(on_mesh)
    torch.testing.assert_close(out.full_tensor(), model(x))
    out.square().sum().backward()
    model(x).square().sum().backward()
    gradients = {name: p.grad.full_tensor() for name, p in program.module().named_parameters() if p.grad is not None}
    gradients = gradients or {name: p.grad.full_tensor() for name, p in placed.named_parameters()}
    torch.testing.assert_close(gradients, {name: p.grad for name, p in model.named_parameters()})


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_module_gives_what_the_module_gives(ranks, strict):
    ranks.run(exported, strict)


def traced():
    warnings.simplefilter("ignore")
    model, x, placed, on_mesh = made()
    torch.testing.assert_close(torch.jit.trace(placed, (on_mesh,))(on_mesh).full_tensor(), model(x))


def test_a_traced_module_gives_what_the_module_gives(ranks):
    ranks.run(traced)


def with_an_attribute(table):
    class Attributed(torch.jit.ScriptModule):
        """Holds a tensor that is neither a parameter nor a buffer."""

        def __init__(self):
            super().__init__()
            self.table = torch.jit.Attribute(table, torch.Tensor)

        @torch.jit.script_method
        def forward(self, x):
            if bool(x.sum() > 0):
                x = x @ self.table
            return x

    return Attributed()


def saved(kind, tmp_path):
    warnings.simplefilter("ignore")
    model, x, placed, on_mesh = made()
    table = sw.distribute_tensor(torch.eye(6), on_mesh.device_mesh, [Shard(0)])
    script = {
        "module": lambda: torch.jit.trace(placed, (on_mesh,)),
        "constant": lambda: torch.jit.trace(lambda t: t @ table, (on_mesh,)),
        "attribute": lambda: with_an_attribute(table),
    }[kind]()
    writes = [
        lambda: torch.jit.save(script, io.BytesIO()),
        script.save_to_buffer,
        lambda: script.save(str(tmp_path / "a")),
    ]
    for write in writes:
        with pytest.raises(LayoutError, match="save a TorchScript program that holds f32"):
            write()
    plain = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, (x,)), plain)
    plain.seek(0)
    torch.testing.assert_close(torch.jit.load(plain)(x), model(x))


@pytest.mark.parametrize("kind", ["module", "constant", "attribute"])
def test_a_script_with_tensors_on_a_mesh_is_not_written(two_ranks, kind, tmp_path):
    """Torch would read address 0, which ends the interpreter, or write nothing."""
    two_ranks.run(saved, kind, tmp_path)


def scripted():
    warnings.simplefilter("ignore")
    _, _, placed, _ = made()
    for module in (placed, copy.deepcopy(placed), nn.Sequential(placed)):
        with pytest.raises(ArgumentError, match=r"cannot compile its hooks.* Use torch.compile, ") as refused:
            torch.jit.script(module)
        assert refused.value.argument == "obj"
    text = str(refused.value)
    whole = eval(text[text.index("{name") : text.index("} into") + 1], {"model": placed})  # noqa: S307  # the remedy
    one = made()[0]
    one.load_state_dict(whole)
    assert isinstance(torch.jit.script(one), torch.jit.ScriptModule)


def test_a_module_on_a_mesh_is_not_scripted_and_the_error_says_what_to_use(two_ranks):
    two_ranks.run(scripted)


def placed_after_scripting():
    warnings.simplefilter("ignore")
    scripted = torch.jit.script(nn.Linear(4, 4))
    inside = nn.Sequential(nn.ReLU(), scripted)
    for module, which in ((scripted, "it is a Linear"), (inside, "its submodule '1' is a Linear")):
        with pytest.raises(ArgumentError, match=f"{which} that torch.jit.script has compiled") as caught:
            sw.distribute_module(module, mesh((dist.get_world_size(),)), {"*weight": [Shard(0)]})
        assert caught.value.argument == "module"
        assert not any(isinstance(p, sw.MeshTensor) for p in module.parameters())


def test_a_scripted_module_is_not_placed_and_the_error_says_what_to_do(two_ranks):
    two_ranks.run(placed_after_scripting)


def placed_after_tracing():
    warnings.simplefilter("ignore")
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    expected = model(x)
    device_mesh = mesh((dist.get_world_size(),))
    placed = sw.distribute_module(torch.jit.trace(model, x), device_mesh, {"0.weight": [Shard(0)]})
    assert all(isinstance(p, sw.MeshTensor) for p in placed.parameters())
    torch.testing.assert_close(placed(sw.distribute_tensor(x, device_mesh, [Shard(0)])).full_tensor(), expected)


def test_a_traced_module_may_be_placed(two_ranks):
    two_ranks.run(placed_after_tracing)
