"""Sites: each collective of a program is named by its module, its line and its reason, forward and backward."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.demo import model as demo_model
from shardwise.demo.large import placed_step
from shardwise.tools.rehearse import rehearse
from shardwise.tools.sites import shown_path

SMALL = partial(placed_step, layers=2, width=16, heads=4, context=8, batch=8)
MESH = (2, 2), ("dp", "tp")


def sites_of(program, mesh=MESH):
    return rehearse(program, *mesh, sites=True).sites


@pytest.fixture(scope="module")
def free():
    return sites_of(partial(SMALL, places_activations=False))


def test_each_collective_has_one_site():
    rehearsal = rehearse(SMALL, *MESH, sites=True)
    assert len(rehearsal.sites) == rehearsal.counts.total()
    assert sum(site.nbytes for site in rehearsal.sites) == rehearsal.nbytes.total()
    assert not rehearse(SMALL, *MESH).sites


def test_an_operand_is_named_with_its_layouts(free):
    (site,) = [s for s in free if s.module == "model.blocks.1.attention.wq" and s.phase == "forward"]
    assert (site.op, site.kind, site.mesh_dims, site.ranks) == ("aten.mm.default", "all_gather", ("tp",), 2)
    assert site.why == "operand `mat2` is moved tp S(1) -> R"
    assert site.implicit
    assert site.line.path.endswith("shardwise/demo/model.py")
    assert "self.wq" in line_of_model(site.line)


def line_of_model(line):
    assert line.path == shown_path(demo_model.__file__)
    return Path(demo_model.__file__).read_text().splitlines()[line.number - 1]


def test_backward_is_at_the_module_and_line_of_the_forward_call(free):
    sites = [s for s in free if s.module == "model.blocks.0.attention.wo" and s.phase == "backward"]
    assert {s.op for s in sites} == {"aten.mm.default", "(gradient)"}
    assert all("self.wo(" in line_of_model(s.line) for s in sites)


def test_gradients_of_parameters_are_named(free):
    why = {s.why for s in free if s.module == "model.blocks.1.norm2" and s.op == "(gradient)"}
    assert why == {f"gradient of `{name}` is brought to its layout: dp, tp P(sum) -> R" for name in ("weight", "bias")}
    assert not any(s.implicit for s in free if s.op == "(gradient)")


def test_a_lowering_is_named(free):
    assert "lowering of aten._log_softmax.default" in {s.why for s in free if s.phase == "forward"}


def rows(mesh):
    return sw.zeros((4, 8), device_mesh=mesh, placements=[Shard(0)] * mesh.ndim, requires_grad=True)


@pytest.mark.parametrize(
    ("call", "op", "why", "is_implicit"),
    [
        (lambda x: x.redistribute(placements=[Replicate()]), "redistribute", "redistribute(): dp S(0) -> R", False),
        (lambda x: x.full_tensor(), "full_tensor", "full_tensor() of the program", False),
        (lambda x: x.sum().item(), "item()", "item() needs it whole", True),
        (lambda x: bool(x.sum()), "bool()", "bool() needs it whole", True),
    ],
)
def test_calls_of_the_program_are_explicit_but_for_those_that_only_read(call, op, why, is_implicit):
    def program(mesh):
        with torch.no_grad():
            call(rows(mesh))

    last = sites_of(program, ((4,), ("dp",)))[-1]
    assert (last.op, last.why, last.implicit, last.module) == (op, why, is_implicit, "")
    assert last.line.path.endswith("test_sites.py")


def test_the_backward_of_a_redistribution_is_the_programs():
    def program(mesh):
        return rows(mesh).redistribute(placements=[Replicate()]).mul(rows(mesh)).sum()

    sites = [s for s in sites_of(program, ((4,), ("dp",))) if s.phase == "backward"]
    assert all(not s.implicit for s in sites)
    assert all(s.why.startswith("gradient of redistribute()") for s in sites)


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def test_a_forward_that_runs_again_in_backward_is_at_its_module():
    def program(mesh):
        model = nn.Sequential(Half(), Half())
        sw.distribute_module(model, mesh, {"*.inner.weight": [Shard(0)]}, src_data_rank=None)
        return model, sw.zeros((4, 8), device_mesh=mesh, placements=[Replicate()], requires_grad=True)

    again = [s for s in sites_of(program, ((4,), ("tp",))) if s.phase == "backward" and "gather" in s.kind]
    assert {s.module for s in again} <= {"0.inner", "1.inner"}
    assert again


def test_gradients_that_waited_are_told_from_others():
    def program(mesh):
        model = nn.Linear(8, 8, bias=False)
        sw.distribute_module(model, mesh, {"weight": [Replicate()]}, src_data_rank=None)
        x = sw.zeros((4, 8), device_mesh=mesh, placements=[Shard(0)])
        with sw.accumulate():
            model(x).sum().backward()

    assert {s.why for s in sites_of(program, ((4,), ("dp",)))} == {"gradients that waited are brought to their layouts"}


def test_prefetched_parameters_are_at_their_unit():
    def program(mesh):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        sw.distribute_module(model, mesh, {"*.weight": [Shard(0)]}, src_data_rank=None)
        sw.prefetch(model, "dp")
        model(sw.zeros((4, 8), device_mesh=mesh, placements=[Shard(0)])).sum().backward()

    sites = [s for s in sites_of(program, ((4,), ("dp",))) if s.op == "prefetch"]
    assert [s.module for s in sites if s.phase == "forward"] == ["0", "1"]


def used_twice(mesh):
    """A row-parallel product that is used twice: by a plan it is reduced once."""
    w = sw.distribute_tensor(torch.zeros(64, 64), mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    x = sw.distribute_tensor(torch.zeros(64, 64), mesh, [Shard(1)], src_data_rank=None)
    hidden = x @ w
    (hidden.relu().sum() + hidden.tanh().sum()).backward()


def test_what_a_plan_moves_is_not_implicit():
    planned = sw.plan(used_twice, (2,), ("tp",))
    sites = rehearse(used_twice, (2,), ("tp",), plan=planned, sites=True).sites
    assert any(s.why.startswith("result rests as") and s.op == "aten.mm.default" for s in sites)
    assert not any(s.implicit for s in sites)
    assert any(s.implicit for s in sites_of(used_twice, ((2,), ("tp",))))


def test_parts_that_add_up_are_moved_by_name():
    def program(mesh):
        x = sw.MeshTensor.from_local(torch.zeros(4), mesh, [Partial(), Partial()])
        x.redistribute(placements=[Replicate(), Replicate()])

    (site,) = sites_of(program)
    assert site.why == "redistribute(): dp, tp P(sum) -> R"


def test_no_path_is_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shown_path(str(tmp_path / "a" / "b.py")) == "a/b.py"
    assert shown_path("/nowhere/at/all/c.py") == "c.py"
    assert shown_path(nn.__file__) == "torch/nn/__init__.py"
