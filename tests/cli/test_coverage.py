"""``shardwise coverage``: the ops of a program without data, and those without a rule."""

import json
import sys
import textwrap

import pytest
import torch
from attrs import evolve
from click.testing import CliRunner
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.cli import main
from shardwise.demo.model import build
from shardwise.demo.run import TENSOR_PARALLEL
from shardwise.demo.settings import RunSettings
from shardwise.demo.training import train
from shardwise.discovery.process import use_registry
from shardwise.kernel import dispatcher
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, Shard
from shardwise.kernel.registry import Registry
from shardwise.kernel.signature import op_name
from shardwise.tools.coverage import cover

SMALL = RunSettings(layers=1, width=16, heads=2, context=8, batch=4, steps=2)


def quiet(_step):
    pass


# -- against a mesh --------------------------------------------------------------------------------------------------


def batches_of_zeros(device="cpu"):
    ids = torch.zeros(SMALL.batch, SMALL.context, dtype=torch.long, device=device)
    return [(ids, ids)] * SMALL.steps


def train_on_one():
    """The demo's GPT as it trains on one device."""
    train(build(SMALL), iter(batches_of_zeros()), SMALL, lambda batch: batch, quiet)


def dispatched_on_mesh(settings):
    """The names of the ops that the demo's GPT dispatches on a mesh of real ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = sw.distribute_module(build(settings), mesh, TENSOR_PARALLEL, src_data_rank=None)
    ids = torch.zeros(settings.batch, settings.context, dtype=torch.long)
    distributed = sw.distribute_tensor(ids, mesh, [Shard(0), REPLICATE], src_data_rank=None)
    seen = set()
    with dispatcher.observe(lambda plan: seen.add(str(plan.schema.op))):
        train(model, iter([(distributed, distributed)] * settings.steps), settings, lambda batch: batch, lambda _: None)
    return seen


@pytest.mark.slow
@pytest.mark.sample
def test_the_ops_of_the_demo_are_those_that_ranks_dispatch(pool):
    coverage = cover(lambda: train_on_one)
    assert coverage.stopped == ""
    # A MeshTensor answers item() itself; float() and bool() take the op.
    assert [use.name for use in coverage.uses if use.data] == ["aten._local_scalar_dense.default"]
    assert {use.name for use in coverage.uses if not use.data} == pool.run(dispatched_on_mesh, SMALL)[0]
    assert coverage.is_complete


def foreach_on_mesh(settings):
    """As before with the loop over parameters that AdamW takes on CPUs by itself, and with inference."""
    mesh = init_device_mesh("cpu", (4,))
    model = sw.distribute_module(build(settings), mesh, {}, src_data_rank=None)
    distributed = sw.distribute_tensor(torch.zeros(4, 8, dtype=torch.long), mesh, [Shard(0)], src_data_rank=None)
    seen = set()
    with dispatcher.observe(lambda plan: seen.add(str(plan.schema.op))):
        scores = model(distributed)
        scores.backward(torch.ones_like(scores))
        torch.optim.AdamW(model.parameters()).step()
    return seen - {"aten.ones_like.default"}


def model_and_inputs():
    return build(SMALL), torch.zeros(4, 8, dtype=torch.long)


def test_a_model_with_inputs_is_trained_for_a_step(pool):
    coverage = cover(lambda: model_and_inputs)
    assert {use.name for use in coverage.uses} == pool.run(foreach_on_mesh, SMALL)[0]
    phases = {use.name: use.phases for use in coverage.uses}
    assert phases["aten.embedding.default"] == {"forward"}
    assert phases["aten.mm.default"] == {"forward", "backward"}
    assert phases["aten.addcdiv_.default"] == {"optimizer"}
    sites = {use.name: use.site.split(":")[0] for use in coverage.uses}
    assert sites["aten.addcdiv_.default"] == "-", "nobody wrote that line"
    assert sites["aten.gelu_backward.default"].endswith("demo/model.py"), "the line of the forward call"


# -- one process -----------------------------------------------------------------------------------------------------


def names(found):
    return [use.name for use in found.uses]


def test_a_large_model_takes_no_memory():
    large = evolve(SMALL, width=1 << 14, heads=64, layers=1)
    coverage = cover(lambda: lambda: (build(large), torch.zeros(4, 8, dtype=torch.long)))
    assert coverage.stopped == ""


def test_building_and_initialising_a_model_is_left_out():
    def program():
        layer = torch.nn.Linear(4, 4)
        layer(torch.randn(2, 4).cos()).sum().backward()

    assert "aten.addmm.default" in names(cover(lambda: program))
    assert not {"aten.uniform_.default", "aten.cos.default"} & set(names(cover(lambda: program)))


def test_a_program_without_modules_counts_from_its_start():
    def program():
        x = torch.randn(4, requires_grad=True)
        return x.cos()

    coverage = cover(lambda: program)
    assert names(coverage)[0] == "aten.cos.default"
    assert {use.name: use.phases for use in coverage.uses}["aten.sin.default"] == {"backward"}


def test_a_backward_pass_that_ran_is_not_run_again():
    def program():
        x = torch.randn(4, requires_grad=True)
        loss = x.cos().sum()
        loss.backward()
        return loss

    coverage = cover(lambda: program)
    assert coverage.stopped == ""
    assert {use.name: use.calls for use in coverage.uses}["aten.sin.default"] == 1


def test_plain_numbers_need_no_rule():
    def program():
        step = torch.tensor(0.0)
        step += 1
        return torch.randn(4) * step.sqrt()

    assert names(cover(lambda: program)) == ["aten.mul.Tensor"]


def test_inference_takes_composite_ops_apart():
    def program():
        with torch.inference_mode():
            torch.nn.functional.mse_loss(torch.randn(4, 4).flatten(), torch.randn(16))

    assert names(cover(lambda: program)) == ["aten.view.default", "aten.mse_loss.default"]


def test_an_optimizer_of_ones_own_and_inputs_by_name():
    def program():
        layer = torch.nn.Bilinear(3, 4, 5)
        inputs = {"input1": torch.randn(2, 3), "input2": torch.randn(2, 4)}
        return layer, inputs, torch.optim.SGD(layer.parameters(), lr=0.1, foreach=True)

    optimizer = [use.name for use in cover(lambda: program).uses if use.phases == {"optimizer"}]
    assert optimizer == ["aten._foreach_add_.List"]


def test_a_number_that_data_decides_gets_a_stand_in():
    def program():
        x = torch.randn(4, requires_grad=True)
        if x.sum().item() > 0 and bool(x.any()):
            return x.cos()
        return x.sin()

    coverage = cover(lambda: program)
    assert "aten.cos.default" in names(coverage)
    assert [use.name for use in coverage.uses if use.data] == ["aten._local_scalar_dense.default"]


def test_a_shape_that_data_decides_ends_the_run_with_what_was_seen():
    def program():
        x = torch.randn(4, requires_grad=True)
        return x.cos().nonzero().tan()

    coverage = cover(lambda: program)
    assert coverage.stopped.startswith("aten.nonzero.default at ")
    assert "test_coverage.py" in coverage.stopped
    assert "depends on data" in coverage.stopped
    assert names(coverage) == ["aten.cos.default", "aten.nonzero.default"]
    assert not coverage.is_complete


def test_what_the_program_raises_is_told_with_its_line():
    def program():
        torch.randn(4).cos()
        raise ValueError("no luck")

    coverage = cover(lambda: program)
    assert coverage.stopped.startswith("ValueError at ")
    assert "test_coverage.py" in coverage.stopped
    assert coverage.stopped.endswith("no luck")
    assert names(coverage) == ["aten.cos.default"]


def test_a_program_that_wants_a_mesh_is_told_to_leave_it_out(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "leave its mesh and process groups out" in cover(lambda: lambda: init_device_mesh("cpu", (2,))).stopped


def test_a_mesh_tensor_is_refused():
    spec = sw.TensorSpec(AbstractMesh((2,)), [REPLICATE], sw.TensorMeta.contiguous((4,), torch.float32))

    def program():
        return sw.MeshTensor(torch.ones(4), spec).cos()

    assert "its operand is a MeshTensor" in cover(lambda: program).stopped


def test_a_module_alone_is_refused():
    assert "Return (model, inputs)" in cover(lambda: lambda: torch.nn.Linear(2, 2)).stopped


def test_nothing_is_left_behind():
    from torch.utils import _foreach_utils

    before = list(_foreach_utils._foreach_supported_types)
    cover(lambda: train_on_one)
    assert _foreach_utils._foreach_supported_types == before
    assert not torch.is_anomaly_enabled()
    assert torch.get_default_device() == torch.device("cpu")
    assert type(torch.ones(2) + 1) is torch.Tensor


def test_on_cuda_the_optimizer_and_attention_are_those_of_cuda():
    coverage = cover(lambda: model_and_inputs, "cuda")
    assert coverage.stopped == ""
    assert "aten._foreach_lerp_.Scalar" in names(coverage)
    assert any("attention" in name and not name.endswith("for_cpu.default") for name in names(coverage))


# -- the command -----------------------------------------------------------------------------------------------------

PROGRAM = """
import torch

library = torch.library.Library("acme_coverage", "FRAGMENT")
try:
    library.define("kernel(Tensor x) -> Tensor")
    library.impl("kernel", lambda x: torch.empty_like(x), "Meta")
except RuntimeError:
    pass  # it was imported before

def covered():
    x = torch.randn(4, 4, requires_grad=True)
    return (x @ x).sum()

def uncovered():
    x = torch.randn(4, 4, requires_grad=True)
    return torch.ops.acme_coverage.kernel(x.detach()).sum() + x.sum()

def stops():
    return torch.randn(4).cos().nonzero()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "program_of_mine.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield "program_of_mine.py"
    sys.modules.pop("program_of_mine", None)


def run(*arguments):
    return CliRunner().invoke(main, ["coverage", *arguments])


@pytest.mark.parametrize("where", ["program_of_mine.py", "program_of_mine"])
def test_a_program_that_is_covered(script, where):
    result = run(f"{where}:covered")
    assert result.exit_code == 0, result.output
    assert "5 of 5 ops have a rule" in result.output
    assert "aten.mm.default" not in result.output
    every = run(f"{where}:covered", "--all").output
    (line,) = [line for line in every.splitlines() if "aten.mm.default" in line]
    assert "shardwise-matmul" in line
    assert "program_of_mine.py:13" in line


def test_a_program_with_an_op_that_has_no_rule(script):
    result = run(f"{script}:uncovered")
    assert result.exit_code == 1
    (line,) = [line for line in result.output.splitlines() if "acme_coverage.kernel.default" in line]
    assert "no rule" in line
    assert "program_of_mine.py:17" in line
    assert "ops have a rule" in result.output


def test_json_has_everything(script):
    result = run(f"{script}:uncovered", "--json")
    assert result.exit_code == 1
    content = json.loads(result.output)
    assert content["missing"] == ["acme_coverage.kernel.default"]
    assert content["ops"][0]["op"] == "acme_coverage.kernel.default"
    assert {row["op"] for row in content["ops"]} >= {"aten.sum.default", "aten.add.Tensor"}
    assert content["stopped"] == ""


def test_a_program_that_stops_early(script):
    result = run(f"{script}:stops")
    assert result.exit_code == 1
    assert "stopped early: aten.nonzero.default at program_of_mine.py:20" in result.output


def test_without_plugins_everything_is_missing(script):
    with use_registry(Registry()):
        result = run(f"{script}:covered")
    assert "0 of 5 ops have a rule" in result.output


@pytest.mark.parametrize(
    ("target", "found"),
    [
        ("program_of_mine.py:nothing", "has no function 'nothing'; its functions are "),
        ("program_of_mine.py:coverd", "has no function 'coverd'; the nearest is covered"),
        ("program_of_mine.py", "does not name a function"),
        ("no_such_file.py:f", "there is no file no_such_file.py; the folder is /"),
        ("program_of_mien.py:f", "; the nearest in that folder is program_of_mine.py"),
        ("no_such/file.py:f", "there is no file no_such/file.py; there is no folder no_such either"),
        ("no_such_module:f", "there is no module no_such_module"),
    ],
)
def test_what_is_no_program(script, target, found):
    result = run(target)
    assert result.exit_code in (1, 2)
    assert found in result.output


def test_cuda_is_covered_without_a_device(script):
    result = run(f"{script}:covered", "--device", "cuda", "--all")
    assert result.exit_code == 0, result.output
    assert "5 of 5 ops have a rule" in result.output


def test_names_are_those_of_the_rules():
    assert all(op_name(use.op) == use.name for use in cover(lambda: train_on_one).uses)
