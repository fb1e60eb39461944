"""Plans of whole steps: verified by a rehearsal, the same in every process, and held from the first step on."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.demo.large import placed_step
from shardwise.engine.decided import in_force
from shardwise.errors import (
    LinksFitError,
    MemoryPlanError,
    MeshMismatchError,
    PlanError,
    PlanFitError,
    PlanFitWarning,
    PlanMeshError,
)
from shardwise.program.plan_file import parse
from shardwise.program.step_plan import read_plan
from shardwise.steps.planning import PLAN_PHASES
from shardwise.steps.search import PlanSearch
from shardwise.testing import mesh
from shardwise.tools.rehearse import rehearse

SMALL = partial(placed_step, layers=2, width=16, heads=4, context=8, batch=8, places_activations=False)
SAMPLE = [pytest.mark.slow, pytest.mark.sample]
TIGHT = {"rtol": 1e-9, "atol": 1e-11}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 16, dtype=torch.float64)
        self.down = nn.Linear(16, 5, dtype=torch.float64)

    def forward(self, x, target):
        return functional.cross_entropy(self.down(torch.relu(self.up(x))), target)


def mlp(on):
    places = {"up.*": [Shard(0)] * on.ndim, "down.weight": [Shard(1)] * on.ndim}
    model = sw.distribute_module(MLP(), on, places, src_data_rank=None)
    whole = [Replicate()] * on.ndim
    x = sw.distribute_tensor(torch.zeros(8, 6, dtype=torch.float64), on, whole, src_data_rank=None)
    target = sw.distribute_tensor(torch.zeros(8, dtype=torch.int64), on, whole, src_data_rank=None)
    return model, (x, target)


PROGRAMS = {
    "mlp": (mlp, (4,), ("tp",)),
    "gpt": (SMALL, (4,), ("tp",)),
    "gpt on 2x2": (SMALL, (2, 2), ("dp", "tp")),
}
OF_THE_SAMPLE = (("weights placed", "gpt on 2x2"), ("weights free", "gpt"))


@pytest.fixture(scope="module")
def planned():
    return sw.plan(mlp, (2,), ("tp",), fixed=("parameters",), name="mlp")


@cache
def freely_planned(name):
    """A plan that places everything, and what its search counted at the peak of a later step."""
    counted = []
    accepts = PlanSearch.accepts

    def measured(self, solved, memory):
        counted.append((memory.later_peak, self._priced.peak(solved.best)))
        return accepts(self, solved, memory)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanSearch, "accepts", measured)
        planned = sw.plan(*PROGRAMS[name])
    return planned, dict(counted)


@pytest.mark.parametrize(
    ("fixed", "name"),
    [
        pytest.param(fixed, name, id=f"{text}-{name}", marks=SAMPLE if (text, name) in OF_THE_SAMPLE else ())
        for text, fixed in {"weights placed": ("parameters",), "weights free": ()}.items()
        for name in PROGRAMS
    ],
)
def test_the_rehearsal_issues_what_was_predicted(fixed, name):
    planned = sw.plan(*PROGRAMS[name], fixed=fixed) if fixed else freely_planned(name)[0]
    assert planned.differences == ()
    step = {use: figures for use, figures in planned.collectives.items() if use.phase != "optimizer"}
    assert step == planned.predicted
    assert planned.recorded_cost is None or planned.cost <= planned.recorded_cost
    assert planned.torn == 0
    assert in_force.decisions is None


@pytest.mark.slow
@pytest.mark.sample
def test_a_view_of_a_moved_operand_makes_the_strided_shard_that_was_decided():
    """At real sizes the head's gradient is sharded before the view that flattens it, and only then."""
    sizes = {"layers": 1, "width": 4288, "heads": 32, "context": 4096, "batch": 128}
    wires = ("infiniband", "nvlink", "infiniband")
    planned = sw.plan(partial(SMALL, **sizes), (8, 16, 8), ("pod", "tp", "dp"), fixed=("parameters",), wires=wires)
    assert planned.differences == ()
    assert planned.rehearsal.memory.kept < planned.recorded.memory.kept / 2


def test_it_says_how_far_it_is_and_how_long_it_took():
    told = []
    planned = sw.plan(mlp, (2,), tell=lambda phase, ops: told.append((phase, ops)))
    assert tuple(dict.fromkeys(phase for phase, _ in told)) == PLAN_PHASES == tuple(planned.seconds)
    assert planned.file.mesh_names == ("dim0",)


def test_a_program_that_runs_its_step_itself_is_planned():
    def program(on):
        model, inputs = mlp(on)
        model(*inputs).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    planned = sw.plan(program, (2,), ("tp",))
    assert planned.differences == ()
    assert set(planned.file.parameters) == {"up.weight", "up.bias", "down.weight", "down.bias"}


# -- free parameters, memory and recipes ------------------------------------------------------------------------------

GPT = (
    partial(placed_step, layers=1, width=32, heads=4, context=8, batch=8, places_activations=False),
    (2, 2),
    ("dp", "tp"),
)


@pytest.fixture(scope="module")
def unlimited():
    return sw.plan(*GPT)


@pytest.mark.slow
@pytest.mark.sample
def test_free_parameters_cost_no_more_than_placed_ones(unlimited):
    placed = sw.plan(*GPT, fixed=("parameters",), prove=True)
    assert 0 <= placed.gap < 0.005
    assert unlimited.cost <= placed.cost
    assert unlimited.file.parameters != placed.file.parameters


def test_wires_are_those_of_one_plan(planned):
    wired = sw.plan(mlp, (2,), ("tp",), fixed=("parameters",), wires=["ethernet"])
    after = sw.plan(mlp, (2,), ("tp",), fixed=("parameters",))
    assert planned.cost == after.cost != wired.cost


class Einsum(nn.Module):
    """A product whose weight gets a gradient with other strides: autograd copies it into new memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 32, 16))

    def forward(self, x):
        return torch.einsum("btd,edh->ebth", x, self.weight).pow(2).mean()


def einsum(on):
    model = Einsum()
    sw.distribute_module(model, on, {"weight": {"tp": Shard(0)}}, src_data_rank=None)
    x = sw.distribute_tensor(torch.ones(4, 8, 32), on, [Shard(0), Replicate()], src_data_rank=None)
    return model, x, torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize("memory", [None, 60_000])
def test_the_copy_of_a_gradient_lies_as_its_parameter(memory):
    planned = sw.plan(einsum, (2, 4), ("dp", "tp"), memory=memory)
    assert planned.differences == ()
    assert not any(use.phase == "optimizer" for use in planned.collectives)


def test_a_plan_on_one_mesh_dim_is_proven():
    for fixed in ((), ("parameters",)):
        assert sw.plan(mlp, (2,), ("tp",), fixed=fixed, prove=True).gap == 0


@pytest.mark.parametrize("part", [pytest.param(0.7, marks=SAMPLE), pytest.param(0.5, marks=SAMPLE)])
def test_a_limit_on_memory_is_kept(unlimited, part):
    limit = int(unlimited.rehearsal.memory.later_peak * part)
    planned = sw.plan(*GPT, memory=limit, prove=True)
    assert planned.rehearsal.memory.later_peak <= limit
    assert planned.cost >= unlimited.cost
    assert 0 < planned.bound <= planned.cost
    assert planned.differences == ()


class Wide(nn.Module):
    """Keeps nothing for a backward pass, and holds much while it runs."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 1024))

    def forward(self, x):
        return torch.relu(x @ self.weight).sum(0)


def wide(on):
    model = sw.distribute_module(Wide(), on, src_data_rank=None)
    x = sw.distribute_tensor(torch.ones(64, 8), on, [Replicate()] * on.ndim, src_data_rank=None)
    with torch.no_grad():
        model(x).redistribute(placements=[Replicate()] * on.ndim)


@pytest.mark.parametrize(("shape", "part"), [((4,), 2), ((2, 2), 2), ((2, 2), 3)])
def test_what_an_op_holds_while_it_runs_is_planned(shape, part):
    """Whole tensors are the cheapest, and hold 512 KiB in one op."""
    free = sw.plan(wide, shape)
    assert free.rehearsal.memory.peak > 512 << 10
    planned = sw.plan(wide, shape, memory=(512 << 10) // part)
    assert planned.rehearsal.memory.peak <= (512 << 10) // part
    assert planned.cost > free.cost
    with pytest.raises(MemoryPlanError, match=r"KiB of it in aten\.\w+"):
        sw.plan(wide, shape, memory=64 << 10)


@pytest.mark.parametrize("name", ["gpt", "gpt on 2x2"])
def test_the_memory_that_a_plan_counts_is_what_its_rehearsal_holds(name):
    ((later_peak, count),) = freely_planned(name)[1].items()
    assert count == pytest.approx(later_peak, rel=0.02)


def test_a_limit_that_nothing_keeps_names_what_fills_it():
    with pytest.raises(
        MemoryPlanError, match=r"every plan holds at least .* at a time.*It is filled by .*weight \("
    ) as error:
        sw.plan(*GPT, memory=10_000)
    assert error.value.limit <= 10_000


@pytest.mark.slow
@pytest.mark.sample
def test_a_plan_is_never_dearer_than_a_recipe(unlimited):
    recipe = sw.plan(*GPT, fixed=("parameters",))
    planned = sw.plan(*GPT, recipes={"tensor parallel": recipe.file})
    assert planned.recipe_costs == {"tensor parallel": pytest.approx(recipe.cost)}
    assert planned.cost <= recipe.cost
    assert unlimited.recipe_costs == {}


def test_a_rehearsal_places_parameters_by_the_plan(unlimited, tmp_path):
    unlimited.save(tmp_path / "free.plan")
    rehearsal = rehearse(*GPT, plan=read_plan(tmp_path / "free.plan"))
    assert rehearsal.counts == unlimited.rehearsal.counts
    assert rehearsal.memory == unlimited.rehearsal.memory


# -- the files -------------------------------------------------------------------------------------------------------


def test_what_is_saved_is_read(planned, tmp_path):
    planned.save(tmp_path / "mlp.plan")
    read = read_plan(tmp_path / "mlp.plan")
    assert read.file.text() == planned.file.text() == (tmp_path / "mlp.plan").read_text()
    assert read.file.digest == planned.file.digest
    assert read.decisions.fingerprint == planned.decisions.fingerprint
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlp.plan", "mlp.plan.decisions.json"]


def test_a_rehearsal_by_a_file_issues_what_the_plan_says(planned, tmp_path):
    planned.save(tmp_path / "mlp.plan")
    rehearsal = rehearse(mlp, (2,), ("tp",), plan=read_plan(tmp_path / "mlp.plan"))
    assert rehearsal.counts == planned.rehearsal.counts
    assert rehearse(mlp, (2,), ("tp",)).counts == planned.recorded.counts


IN_A_PROCESS = (
    "import sys, test_planning as t, shardwise as sw; "
    "sw.plan(t.mlp, (2,), ('tp',), fixed=('parameters',), name='mlp').save(sys.argv[1])"
)


@pytest.mark.slow
@pytest.mark.sample
def test_two_processes_write_the_same_bytes(planned, tmp_path):
    planned.save(tmp_path / "here.plan")
    environment = {**os.environ, "PYTHONHASHSEED": "7", "SHARDWISE_LINKS": "off"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    command = [sys.executable, "-c", IN_A_PROCESS, str(tmp_path / "there.plan")]
    subprocess.run(command, env=environment, check=True, timeout=200)
    for end in ("plan", "plan.decisions.json"):
        assert (tmp_path / f"here.{end}").read_bytes() == (tmp_path / f"there.{end}").read_bytes()


# -- real ranks ------------------------------------------------------------------------------------------------------


def train_by(path):
    from shardwise.engine import decided  # its state is that of the rank, and not of the process that sends this

    on = mesh((2,), ("tp",))
    torch.manual_seed(0)
    one = MLP()
    many = copy.deepcopy(one)
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.arange(8) % 5
    try:
        sw.distribute_module(many, on, path)
        inputs = sw.distribute_tensor(x, on, [Replicate()]), sw.distribute_tensor(target, on, [Replicate()])
        steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, many)]
        for _ in range(3):
            losses = one(x, target), many(*inputs)
            torch.testing.assert_close(losses[1].full_tensor(), losses[0], **TIGHT)
            for loss, step in zip(losses, steps, strict=True):
                step.zero_grad()
                loss.backward()
                step.step()
        assert decided.in_force.known > 0
        for p, q in zip(one.parameters(), many.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, **TIGHT)
            torch.testing.assert_close(q.full_tensor(), p, **TIGHT)
    finally:
        decided.use_decisions(None)


@pytest.mark.parametrize("memory", [None, 6000])
def test_two_ranks_train_by_a_plan_as_one_device(two_ranks, planned, tmp_path, memory):
    made = planned if memory is None else sw.plan(mlp, (2,), ("tp",), memory=memory)
    made.save(tmp_path / "mlp.plan")
    two_ranks.run(train_by, str(tmp_path / "mlp.plan"))


# -- what is refused -------------------------------------------------------------------------------------------------


def other_module(path):
    from shardwise.engine import decided

    on = mesh((2,), ("tp",))
    with pytest.raises(PlanFitError, match=r"no line of \[parameters\] places 'weight'"):
        sw.distribute_module(nn.Linear(4, 4), on, path)
    with pytest.raises(PlanFitError, match=r"its line 'down.bias' of \[parameters\] fits nothing"):
        sw.distribute_module(nn.ReLU(), on, path)
    with pytest.raises(PlanMeshError, match="is for a mesh of tp 2, and this mesh has dp 2"):
        sw.distribute_module(MLP(), mesh((2,), ("dp",)), path)
    assert decided.in_force.decisions is None
    with pytest.raises(PlanError, match="the partition is not one"):
        sw.distribute_module(nn.Linear(4, 4), on, {"weight": [Shard(0)]}, loose=True)
    with pytest.warns(PlanFitWarning) as told:
        module = sw.distribute_module(nn.Sequential(nn.Linear(4, 4)), on, path, loose=True)
    assert {w.filename for w in told} == {__file__}
    texts = "\n".join(str(w.message) for w in told)
    assert "no line of [parameters] places '0.weight'" in texts
    assert "its line 'down.bias' of [parameters] fits nothing in the module" in texts
    assert all(p.placements == (Replicate(),) for p in module.parameters())
    decided.use_decisions(None)


def test_a_plan_for_another_module_or_mesh_is_refused(two_ranks, planned, tmp_path):
    planned.save(tmp_path / "mlp.plan")
    two_ranks.run(other_module, str(tmp_path / "mlp.plan"))


def test_inputs_are_always_fixed():
    with pytest.raises(PlanError, match="inputs and buffers always stay where the program places them"):
        sw.plan(mlp, (2,), fixed=("inputs",))


def test_a_program_without_ops_on_the_mesh_is_refused():
    with pytest.raises(PlanError, match="the program ran no op on a mesh"):
        sw.plan(lambda _mesh: None, (2,))


def test_two_layouts_of_one_name_are_refused():
    def program(on):
        a, b = (nn.Linear(4, 4, bias=False) for _ in "ab")
        sw.distribute_module(a, on, {"weight": [Shard(0)]}, src_data_rank=None)
        sw.distribute_module(b, on, {"weight": [Shard(1)]}, src_data_rank=None)
        x = sw.zeros((4, 4), device_mesh=on, placements=[Replicate()])
        b(a(x)).sum().backward()

    with pytest.raises(PlanError, match="two tensors are called 'weight', and they lie differently"):
        sw.plan(program, (2,))


@pytest.mark.parametrize("wires", [("copper",), ("nvlink", "nvlink")])
def test_connections_without_figures_are_refused(wires):
    with pytest.raises(LinksFitError, match="cost redistributions with the connections"):
        sw.plan(mlp, (2,), wires=wires)


def test_a_process_with_a_group_is_refused():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(MeshMismatchError, match="plan a step: this process has a process group"):
            sw.plan(mlp, (2,))
    finally:
        dist.destroy_process_group()


# -- what is kept ------------------------------------------------------------------------------------------------------


def edited(planned, tmp_path, *changes):
    """The plan's file as a person has edited it."""
    text = planned.file.text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return parse(text, str(tmp_path / "edited.plan"))


def test_parameters_of_a_kept_plan_lie_as_it_says(unlimited, tmp_path):
    line = next(line for line in unlimited.file.text().splitlines() if line.startswith('"head.weight"'))
    keep = edited(unlimited, tmp_path, (line, '"head.weight" = { dp = "S(1)", tp = "S(0)" }'))
    planned = sw.plan(*GPT, keep=keep)
    assert planned.file.placements_of("head.weight")[1] == (Shard(1), Shard(0))
    assert planned.file.placements_of("norm.weight") == unlimited.file.placements_of("norm.weight")
    assert planned.differences == ()
    assert planned.cost >= unlimited.cost


def twice(on):
    """A row-parallel product that is used twice: its result is reduced once, and rests so."""
    w = sw.distribute_tensor(torch.zeros(64, 64), on, [Shard(0)], src_data_rank=None).requires_grad_()
    x = sw.distribute_tensor(torch.zeros(64, 64), on, [Shard(1)], src_data_rank=None)
    hidden = x @ w
    (hidden.relu().sum() + hidden.tanh().sum()).backward()


def test_moves_of_a_kept_plan_without_a_reason_are_made(tmp_path):
    planned = sw.plan(twice, (2,), ("tp",))
    (line,) = planned.file.rests
    reason, to = f'why = "{line.why}"\n', f'to = {{ tp = "{line.to["tp"]}" }}'
    keep = edited(planned, tmp_path, (reason, ""), (to, 'to = { tp = "S(1)" }'))
    other = sw.plan(twice, (2,), ("tp",), keep=keep)
    assert [dict(rests.to) for rests in other.file.rests if rests.place == line.place] == [{"tp": "S(1)"}]
    assert other.differences == ()
    assert other.cost >= planned.cost
    same = sw.plan(twice, (2,), ("tp",), keep=edited(planned, tmp_path, (reason, "")))
    assert same.cost == planned.cost
    none = edited(planned, tmp_path, (reason, ""), (f'op = "{line.op}"', 'op = "aten.none.default"'))
    with pytest.raises(PlanFitError, match=r"no call of aten.none.default in .* can have its result as tp"):
        sw.plan(twice, (2,), ("tp",), keep=none)
    with pytest.warns(PlanFitWarning, match=r"no call of aten.none.default in .* can have its result as tp") as told:
        free = sw.plan(twice, (2,), ("tp",), keep=none, loose=True)
    assert [w.filename for w in told] == [__file__]
    assert free.cost == planned.cost


def test_a_recipe_for_other_mesh_dims_is_refused(planned):
    with pytest.raises(PlanMeshError, match="its mesh dims are tp, and those of this mesh dp"):
        sw.plan(mlp, (2,), ("dp",), recipes={"mlp": planned.file})
