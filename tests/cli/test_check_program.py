"""``shardwise check``: right programs pass, and what is planted is found, with its module and its op."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner

from shardwise.cli import check_program as command
from shardwise.cli import main
from shardwise.testing import WorkerPool
from shardwise.testing.step_check import check_step

PAGE = Path(__file__).parents[2] / "docs" / "check.md"
PROGRAM = """
import dataclasses
import os

import torch
from torch import nn
import torch.nn.functional as F
import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.rule import rule

PLACES = {"*up.weight": {"tp": Shard(0)}, "*up.bias": {"tp": Shard(0)}, "*down.weight": {"tp": Shard(1)}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down, self.drop = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.embed, self.first, self.inner, self.second = nn.Embedding(9, 8), Block(), inner or nn.Identity(), Block()

    def forward(self, ids):
        x = self.second(self.inner(self.first(self.embed(ids))))
        return F.cross_entropy((x @ self.embed.weight.t()).flatten(0, 1), ids.flatten())


def build(mesh, inner=None):
    model = sw.distribute_module(Model(inner), mesh, PLACES)
    ids = sw.distribute_tensor(torch.randint(9, (5, 3)), mesh, [Shard(0), Replicate()])
    return model, ids


def right(mesh):
    model, ids = build(mesh)
    return model, ids, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loop(mesh):
    model, ids = build(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(ids)
    loss.backward()
    optimizer.step()
    return loss.detach()


WRONG_PRODUCT = rule(torch.ops.aten.addmm.default, "n, m k, k n -> m n", reduce={"k": "sum"})


def wrong_rule(mesh):
    with sw.override(WRONG_PRODUCT):
        return loop(mesh)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x):
        part = x.redistribute(placements=[Shard(0), Replicate()]).to_local() * self.gain.to_local()
        return sw.MeshTensor.from_local(part, x.device_mesh, [Shard(0), Replicate()], shape=x.shape)


def wrong_gradient(mesh):
    return build(mesh, Scale())


class Claims(nn.Module):
    def forward(self, x):
        rows = [Shard(0), Replicate()]
        f = sw.local(lambda a: (a, a.sum(0)), inputs=(rows,), outputs=(rows, Replicate()))
        y, total = f(x)
        return y + total


def wrong_local(mesh):
    return build(mesh, Claims())


def copies(mesh):
    if mesh.size() == 1:
        return build(mesh)
    return build(mesh, Noise())


class Noise(nn.Module):
    def forward(self, x):
        part = x.full_tensor() + (torch.distributed.get_rank() == 3)
        return sw.MeshTensor.from_local(part, x.device_mesh, [Replicate(), Replicate()])


def own_data(mesh):
    model, _ = build(mesh)
    return model, sw.MeshTensor.from_local(torch.randint(9, (3, 3)), mesh, [Shard(0), Replicate()])


def other_way(mesh):
    model, ids = build(mesh)
    return (model if mesh.size() == 1 else model.first), (ids if mesh.size() == 1 else model.embed(ids))


def raises(mesh):
    if mesh.size() > 1:
        raise ValueError("no such mesh")
    return build(mesh)


# -- right programs whose numbers are close to rounding, or whose code is compiled


def ends_in_softmax(mesh):
    # The sum of its results has no gradient: what is left is rounding.
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Softmax(-1))
    return sw.distribute_module(model, mesh, {"0.weight": {"tp": Shard(0)}}), rows(mesh)


def sum_of_softmax(mesh):
    model, x = ends_in_softmax(mesh)
    loss = model(x).sum()
    loss.backward()
    return loss.detach()


def rows(mesh):
    return sw.distribute_tensor(torch.randn(10, 8), mesh, [Shard(0), Replicate()])


def block(mesh, *inner):
    return sw.distribute_module(nn.Sequential(Block(), *inner), mesh, PLACES)


def autocast(mesh):
    model, x = block(mesh), rows(mesh)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach()


def compiled(mesh):
    model, x = block(mesh), rows(mesh)
    loss = torch.compile(model, backend="aot_eager")(x).square().mean()
    loss.backward()
    return loss.item()


# -- wrong programs whose results of modules are right


class LocalMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        with torch.no_grad():
            self.mean.to_local().copy_(x.to_local().mean(0))
        return 2 * x


def wrong_buffer(mesh):
    return block(mesh, LocalMean()), rows(mesh)


def wrong_number(mesh):
    loss = block(mesh)(rows(mesh)).square().mean()
    loss.backward()
    return {"loss": float(loss.detach().to_local())}


class TooMuch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.ranks = x.device_mesh.size()
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.ranks


def wrong_gradient_of_a_leaf(mesh):
    w = sw.distribute_tensor(torch.randn(8, 4), mesh, [Replicate(), Replicate()]).requires_grad_()
    loss = TooMuch.apply(rows(mesh) @ w).square().sum()
    loss.backward()
    return loss.detach()


def forgets_gradients(mesh):
    # Adam makes the same step by twice the gradients.
    model = block(mesh)
    optimizer = torch.optim.Adam(model.parameters())
    TooMuch.apply(model(rows(mesh))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def wrong_rule_without_modules(mesh):
    w = sw.distribute_tensor(torch.randn(8, 4), mesh, [Replicate(), Replicate()])
    bias = sw.distribute_tensor(torch.randn(4), mesh, [Replicate(), Replicate()])
    x = sw.distribute_tensor(torch.randn(10, 8), mesh, [Replicate(), Shard(1)])
    with sw.override(WRONG_PRODUCT):
        return torch.addmm(bias, x, w).relu() + 1


class OwnNumbers(nn.Module):
    def forward(self, x):
        factors = torch.arange(8.0).to_local() + 10 * torch.distributed.get_rank()
        return x * sw.MeshTensor.from_local(factors, x.device_mesh, [Replicate(), Replicate()])


def right_on_the_first_rank(mesh):
    return block(mesh, OwnNumbers()), rows(mesh)


class RowsHere(nn.Module):
    def forward(self, x):
        return x / x.to_local().shape[0]


def other_number(mesh):
    return block(mesh, RowsHere()), rows(mesh)


class More(nn.Module):
    def forward(self, x):
        return x.abs() if x.device_mesh.size() > 1 else x


def another_op(mesh):
    return block(mesh, More()), rows(mesh)


@dataclasses.dataclass
class Result:
    loss: object
    number: float


class InDataclass(nn.Module):
    def forward(self, x):
        return Result((x * x.device_mesh.size()).sum(), 1.0)


def wrong_in_a_dataclass(mesh):
    return sw.distribute_module(InDataclass(), mesh, {})(rows(mesh))


# -- programs that do not return


def ends(mesh):
    os._exit(7)


def makes_a_group(mesh):
    torch.distributed.init_process_group("gloo")


def takes_all_memory(mesh):
    os.kill(os.getpid(), 9)


def in_torch(mesh):
    return block(mesh), 3


def module_alone(mesh):
    return block(mesh)
"""


@pytest.fixture(scope="module")
def alone():
    with WorkerPool(1, start_method="forkserver") as one:
        yield one


@pytest.fixture
def check(tmp_path, monkeypatch, alone, request):
    """The command on workers that are there already: on two where a test asks for two ranks, else on four."""
    on_two = "two_ranks" in request.fixturenames
    ranks = request.getfixturevalue("two_ranks" if on_two else "pool")
    monkeypatch.setattr(command, "check_step", partial(check_step, pools=(alone, ranks)))
    path = tmp_path / "program_to_check.py"
    path.write_text(PROGRAM)

    def run(function, *options, code=0, shape="2x1" if on_two else "2x2"):
        result = CliRunner().invoke(
            main, ["check", f"{path}:{function}", "--mesh", shape, "--names", "dp,tp", *options]
        )
        assert result.exit_code == code, result.output
        return result.output

    return run


@pytest.mark.parametrize("function", ["right", "loop"])
def test_a_right_program_is_the_same(check, function):
    found = json.loads(check(function, "--json"))
    assert found["same"]
    assert found["differences"] == []
    assert found["compared"]["gradients"] == found["compared"]["parameters"] == 13
    assert found["compared"]["forward"] == 13


def test_in_double_precision_nothing_is_off_by_much(check):
    assert "The same as on one device, on 4 ranks (2x2): 13 parameters" in check("right", "--double", "--rtol", "1e-12")


@pytest.mark.slow
def test_the_ranks_may_run_by_a_plan(check, tmp_path):
    program = f"{tmp_path / 'program_to_check.py'}:right"
    out = str(tmp_path / "step.plan")
    planned = CliRunner().invoke(main, ["plan", program, "--mesh", "2x2", "--names", "dp,tp", "--out", out])
    assert planned.exit_code == 0, planned.output
    assert json.loads(check("right", "--plan", out, "--json"))["same"]


def test_a_wrong_rule_is_named(check):
    text = check("wrong_rule", code=1)
    assert "The first that differs, on all ranks: forward: module first.down, output" in text
    assert re.search(r"The first op of it that differs is aten.addmm.default at \S*program_to_check.py:\d+\n", text)
    assert re.search(r"by the rule of override .* at \S*program_to_check.py:\d+, rows R; shard k", text)
    document = json.loads(check("wrong_rule_without_modules", "--json", code=1))
    assert document["op"]["op"] == "aten.addmm.default"


@pytest.mark.slow
@pytest.mark.sample
def test_a_wrong_gradient_at_the_border_is_named(check):
    found = json.loads(check("wrong_gradient", "--json", code=1))
    assert (found["differences"][0]["stage"], found["differences"][0]["what"]) == ("gradients", "inner.gain")
    assert found["op"] is None
    assert "look at what goes through to_local" in check("wrong_gradient", code=1)


@pytest.mark.slow
@pytest.mark.sample
def test_a_wrong_claim_of_a_local_function_is_named(check):
    found = json.loads(check("wrong_local", "--json", code=1))
    assert (found["differences"][0]["module"], found["differences"][0]["ranks"]) == ("inner", [0, 1, 2, 3])
    assert found["op"]["op"] == "aten.add.Tensor"
    assert "program_to_check.py:" in found["op"]["line"]
    assert "reads it, and no op before gave it" in check("wrong_local", code=1)


def test_copies_that_differ_on_one_rank_show(check):
    found = json.loads(check("copies", "--json", code=1))
    first = found["differences"][0]
    assert (first["module"], first["ranks"]) == ("inner", [3])


def test_data_of_each_rank_is_no_program_for_one_device(check):
    text = check("own_data", code=1)
    assert "inputs: input 0\n  it is int64[6, 3] where one device has int64[3, 3]" in text
    assert "make them whole, from the same seed" in text


@pytest.mark.slow
@pytest.mark.sample
def test_another_way_through_the_program(check):
    found = json.loads(check("other_way", "--json", code=1))
    assert found["differences"][0]["found"].startswith("one device has start: embed.weight here")


def test_what_a_program_raises(check):
    text = check("raises", code=1)
    assert "the program raised ValueError on all ranks: no such mesh" in text
    assert text.rstrip().endswith('raise ValueError("no such mesh")') or "^" in text.splitlines()[-1]
    assert "Traceback" not in text
    document = json.loads(check("raises", "--json", code=1).partition("\nError: ")[0])
    assert document["error"]["message"].startswith("the program raised ValueError on all ranks: no such mesh\n")


@pytest.mark.parametrize("function", ["ends_in_softmax", "autocast", "compiled"])
def test_what_is_off_by_rounding_alone_is_the_same(check, function):
    text = check(function)
    assert text.splitlines()[-1].startswith("The same as on one device, on 4 ranks (2x2): ")
    assert "gradients" in text
    assert "All gradients" not in text


def test_gradients_that_may_be_rounding_alone_are_told(check, two_ranks):
    text = check("sum_of_softmax")
    assert "All gradients are below 1.9e-06, where rounding may be all there is" in text
    assert json.loads(check("sum_of_softmax", "--json"))["small_gradients"] > 0


READS = r"The first op with a wrong value, {op} at \S*program_to_check.py:\d+, reads it, and no op before gave it"


@pytest.mark.parametrize(
    ("function", "stage", "what", "op"),
    [
        ("wrong_buffer", "buffers", "1.mean", "No op on MeshTensors gives a wrong value"),
        ("wrong_number", "result", "what the program returned", "No op on MeshTensors gives a wrong value"),
        ("wrong_gradient_of_a_leaf", "gradients", "leaf 0 [8, 4]", READS.format(op="aten.mul.Tensor")),
        ("forgets_gradients", "gradients", "0.norm.weight", READS.format(op="aten.mul.Tensor")),
        (
            "wrong_rule_without_modules",
            "result",
            "what the program returned",
            r"that differs is aten.addmm.default at ",
        ),
        ("right_on_the_first_rank", "forward", "output", READS.format(op="aten.mul.Tensor")),
        ("other_number", "forward", "output", READS.format(op="aten.div.Tensor")),
        (
            "another_op",
            "forward",
            "output",
            r"The ranks also run aten.abs.default at \S+:\d+, which one device does not",
        ),
        ("wrong_in_a_dataclass", "forward", "output", READS.format(op="aten.mul.Tensor")),
    ],
)
def test_what_no_result_of_a_module_shows_is_found(check, two_ranks, function, stage, what, op):
    text = check(function, code=1, shape="1x2" if function == "wrong_rule_without_modules" else "2x1")
    assert re.search(rf"The first that differs, on all ranks: {stage}: .*{re.escape(what)}\n", text), text
    assert re.search(op, text), text


def test_a_program_that_returns_no_step_is_told_in_one_line(check):
    assert check("module_alone", code=1).startswith("Error: check the program: it returned a module without inputs. ")


def test_lines_inside_of_torch_are_counted(check):
    text = check("in_torch", code=1)
    assert text.startswith("Error: the program raised TypeError on one device: ")
    assert "more inside of torch and shardwise ..." in text
    assert "_call_impl" not in text
    assert "makes no process group and no mesh of its own" in check("makes_a_group", code=1)


def test_a_process_that_is_killed_may_have_taken_too_much_memory(check):
    said = check("takes_all_memory", code=1)
    assert said.startswith("Error: the program did not return on one device: its process was killed by SIGKILL. The")
    assert "memory" in said
    assert "check a model of fewer layers" in said


@pytest.mark.slow
@pytest.mark.sample
def test_a_process_that_ends_is_told(check):
    assert check("ends", code=1).startswith("Error: the program did not return on one device: its process ended with")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shardwise-matmul", "--mesh", "2"], "is a plugin: `shardwise plugins check shardwise-matmul`"),
        (["nonsense", "--mesh", "2"], "'nonsense' does not name a function"),
        (["a.py:f"], "Missing option '--mesh'"),
        (["a.py:f", "--mesh", "2y2"], "is not a mesh: write 4"),
        (["a.py:f", "--mesh", "2x2", "--names", "dp"], "1 name and the mesh 2 dims"),
        (["a.py:f", "--mesh", "64x64"], "4,096 ranks needs as many processes"),
        (["a.py:f", "--mesh", "2", "--rtol", "3"], "3.0 is not in the range"),
        (["a.py:f", "--mesh", "2", "--plan", "none.toml"], "does not exist"),
        (["/nowhere/a.py:f", "--mesh", "2"], "there is no file /nowhere/a.py"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, words):
    result = CliRunner().invoke(main, ["check", *arguments])
    assert result.exit_code in (1, 2)
    assert words in result.output


def test_plugins_check_says_who_checks_programs():
    result = CliRunner().invoke(main, ["plugins", "check", "program.py:step"])
    assert result.exit_code == 1
    assert "`shardwise check program.py:step --mesh 2x2` compares it with one device" in result.output


def test_the_page_shows_what_is_printed(tmp_path, monkeypatch, alone, pool):
    block = re.search(r"```console\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    program, _, shown = block.removeprefix("$ cat program.py\n").partition("$ shardwise check")
    (tmp_path / "program.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "check_step", partial(check_step, pools=(alone, pool)))
    words, _, expected = shown.partition("\n")
    result = CliRunner().invoke(main, ["check", str(tmp_path / "program.py:step"), *words.split()[1:]])
    assert result.exit_code == 1
    lines = [re.sub(r"\s+", " ", line) for line in result.output.splitlines()]
    for line in expected.splitlines():
        known = re.sub(r"\s+", " ", line).rstrip().removesuffix("...")
        assert any(actual.startswith(known) for actual in lines), (line, result.output)
