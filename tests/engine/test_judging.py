"""Policies on implicit communication: what is forbidden is not sent, on any rank, and no number changes.

Laws over random programs are in tests/programs/test_judged_programs.py.
"""

from __future__ import annotations

import threading
import warnings
from functools import partial

import pytest
import torch
from attrs import evolve
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm import policy  # the module: workers get other globals by value
from shardwise.comm.events import observe
from shardwise.engine.decided import use_decisions
from shardwise.errors import CommunicationError, CommunicationWarning, SettingsError, TracingError
from shardwise.program.step_plan import read_plan
from shardwise.testing import mesh
from shardwise.tools.rehearse import rehearse

R = Replicate()
DP_TP = (2, 2), ("dp", "tp")


def values(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def on_two(whole, *placements):
    return sw.distribute_tensor(whole, mesh((2,), ("tp",)), list(placements))


def sent(run):
    """The result or the error of a run, and the collectives that it issued."""
    kinds = []
    with observe(lambda event: kinds.append(event.kind)):
        try:
            result = run()
        except CommunicationError as error:
            result = error
    return result, kinds


def pending():
    """A sum over the ranks that nobody has added up, which relu needs."""
    return on_two(values(4, 6), Shard(1)) @ on_two(values(6, 4, seed=1), Shard(0))


def forbidden(run, *args, **conditions):
    with sw.communication("forbid", **conditions):
        error, kinds = sent(partial(run, *args))
    assert isinstance(error, CommunicationError), error
    assert not kinds, kinds
    return error


# -- one call --------------------------------------------------------------------------------------------------------


def says_everything():
    total = pending()
    error = forbidden(total.relu)
    assert (error.op, error.operand, error.kind) == ("aten.relu.default", "self", "reduce_scatter")
    assert (error.mesh_dims, error.nbytes, error.phase, error.policy) == (("tp",), 128, "forward", "forbid")
    assert error.site[0].endswith("test_judging.py")
    assert "self lies as [P(sum)], and it is needed as [S(0)]" in str(error)
    # What it says to do is what makes it run.
    assert "redistribute(placements=[Shard(0)])" in error.do
    with sw.communication("forbid"):
        result, kinds = sent(lambda: total.redistribute(placements=[Shard(0)]).relu())
    assert kinds == ["reduce_scatter"]
    torch.testing.assert_close(result.full_tensor(), (values(4, 6) @ values(6, 4, seed=1)).relu())


def test_an_error_says_what_would_be_sent_and_how_to_write_it(two_ranks):
    two_ranks.run(says_everything)


def of_every_kind():
    columns = on_two(values(4, 6), Shard(1))
    assert forbidden(lambda: columns.softmax(1)).operand == ""  # the rule's own lowering
    assert "self.redistribute(placements=[Replicate()])" in forbidden(lambda: columns.softmax(1)).do
    assert forbidden(lambda: columns.view(24)[3:5]).op == "aten.slice.Tensor"
    assert forbidden(lambda x: x.sum().item(), pending()).op == "item()"
    assert forbidden(pending().tolist).op == "tolist()"
    assert forbidden(lambda x: bool(x.sum() > 0), pending()).op == "aten.gt.Scalar"
    assert forbidden((pending() * 1).relu_).op == "aten.relu_.default"
    out = on_two(torch.zeros(4, 6, dtype=torch.float64), Shard(0))
    assert forbidden(lambda: torch.exp(columns, out=out)).op == "aten.exp.out"
    assert "[0]" in forbidden(torch._foreach_exp, [pending(), pending()]).operand
    weight = on_two(values(6, 6), Shard(0)).requires_grad_()
    weight.grad = on_two(values(6, 6), Shard(0))
    assert forbidden(lambda: nn.utils.clip_grad_norm_([weight], 1.0)).kind == "all_reduce"
    largest = pending().requires_grad_()
    assert forbidden(lambda: torch.maximum(largest, largest * 1)).operand in ("self", "other")


def test_whatever_would_send_something_is_judged(two_ranks):
    two_ranks.run(of_every_kind)


def of_no_kind():
    rows = on_two(values(4, 6), Shard(0))
    with sw.communication("forbid"):
        _, kinds = sent(lambda: (rows.relu() + 1).sum(1).exp())
        assert not kinds
        total = pending()
        assert isinstance(sent(total.full_tensor)[0], torch.Tensor)
        assert isinstance(sent(lambda: total.redistribute(placements=[R]))[0], sw.MeshTensor)
        assert sent(lambda: repr(total))[1] == []
    # What an earlier call has moved is there: this one sends nothing.
    total = pending() * 1
    assert sent(total.relu)[1] == ["reduce_scatter"]
    with sw.communication("forbid"):
        result, kinds = sent(total.relu)
    assert isinstance(result, sw.MeshTensor)
    assert not kinds


def test_what_is_asked_for_and_what_sends_nothing_runs(two_ranks):
    two_ranks.run(of_no_kind)


# -- which policy holds ----------------------------------------------------------------------------------------------


def conditions():
    on = mesh(*DP_TP)
    tall = sw.distribute_tensor(values(8, 6), on, [Shard(1), R])
    wide = sw.distribute_tensor(values(6, 8, seed=1), on, [Shard(0), R])

    def sums():
        return (tall @ wide).relu()  # a reduce_scatter over dp, 256 bytes of a rank or more

    assert forbidden(sums, over="dp").policy == "forbid over dp"
    assert forbidden(sums, over=0).mesh_dims == ("dp",)
    assert forbidden(sums, kinds=("reduce_scatter", "all_gather")).kind == "reduce_scatter"
    assert forbidden(sums, above=100).nbytes > 100
    for passing in ({"over": "tp"}, {"kinds": "all_gather"}, {"above": 1 << 20}, {"phases": "backward"}):
        with sw.communication("forbid", **passing):
            assert sent(sums)[1] == ["reduce_scatter"], passing
    with sw.communication("forbid"), sw.communication("allow", over="dp"):
        assert sent(sums)[1] == ["reduce_scatter"]
    with sw.communication("allow", over="dp"), sw.communication("forbid"):
        assert isinstance(sent(sums)[0], CommunicationError)
    with pytest.raises(SettingsError, match="no mesh has a dim 'ddp'"), sw.communication("forbid", over="ddp"):
        sums()
    with pytest.raises(SettingsError, match="no mesh has a dim 5; there are 0, 1"), sw.communication("forbid", over=5):
        sums()
    assert policy.in_force.stack == ()


def test_conditions_and_nesting(pool):
    pool.run(conditions)


def warns():
    with sw.communication("warn"), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(3):
            pending().relu()
    assert [w.category for w in seen] == [CommunicationWarning]
    assert "it needs reduce_scatter over tp (2 ranks), 128 bytes of a rank" in str(seen[0].message)
    assert seen[0].filename.endswith("test_judging.py")


def test_a_warning_comes_once_for_each_line(two_ranks):
    two_ranks.run(warns)


def by_environment():
    before = policy.in_force.stack, policy.in_force.settings
    try:
        policy.in_force.settings = (sw.communication("forbid", over="tp").policy,)
        policy.in_force.enter(policy.in_force.settings)
        assert isinstance(sent(pending().relu)[0], CommunicationError)
        with sw.communication("allow"):
            pending().relu()
    finally:
        policy.in_force.settings = before[1]
        policy.in_force.enter(before[0])


def test_scopes_are_inside_the_settings(two_ranks):
    two_ranks.run(by_environment)


def in_a_thread(run):
    """What a run gives in a thread of its own."""
    results = []
    thread = threading.Thread(target=lambda: results.append(sent(run)))
    thread.start()
    thread.join()
    return results[0]


def thread_by_thread():
    with sw.communication("forbid"):
        assert in_a_thread(pending().relu)[1] == ["reduce_scatter"], "a thread inherits no policy"
        assert isinstance(sent(pending().relu)[0], CommunicationError)
    scope, has_entered, may_leave = sw.communication("forbid"), threading.Event(), threading.Event()
    seen = []

    def other():
        with scope:
            has_entered.set()
            may_leave.wait(60)
            seen.append(sent(pending().relu)[0])

    thread = threading.Thread(target=other)
    thread.start()
    assert has_entered.wait(60)
    with scope:  # the same one, in two threads at a time
        may_leave.set()
        thread.join()
    assert sent(pending().relu)[1] == ["reduce_scatter"]
    assert isinstance(seen[0], CommunicationError)
    assert policy.in_force.stack == ()


def test_each_thread_has_its_own_policies(two_ranks):
    two_ranks.run(thread_by_thread)


# -- backward --------------------------------------------------------------------------------------------------------


def loss_under(action, **conditions):
    """A loss whose backward pass gathers a weight over tp: its forward pass sends nothing."""
    weight = on_two(values(4, 4), Shard(1)).requires_grad_()
    x = on_two(values(4, 4, seed=1), R).requires_grad_()
    with sw.communication(action, **conditions):
        product = (x * 2).exp() @ weight
        result, kinds = sent(lambda: product.redistribute(placements=[R], grad_placements=[Partial()]))
        assert kinds == ["all_gather"]  # the one that is asked for
        return result.sum(), weight


def backward():
    def run(loss, around):
        with sw.communication(around):
            return sent(loss.backward)

    error, kinds = run(loss_under("forbid")[0], "allow")
    assert isinstance(error, CommunicationError)
    assert (error.phase, error.op, kinds) == ("backward", "aten.mm.default", [])
    assert "in the backward pass of MmBackward0" in str(error)
    loss, weight = loss_under("allow")
    result, allowed = run(loss, "forbid")
    assert result is None
    assert "all_gather" in allowed
    assert weight.grad is not None
    loss, _ = loss_under("forbid", phases="forward")
    assert run(loss, "forbid")[0] is None


def test_a_backward_pass_is_judged_by_the_policy_of_its_forward_ops(two_ranks):
    two_ranks.run(backward)


def backward_of_a_lowering():
    x = on_two(values(4, 4), Shard(1)).requires_grad_()
    with sw.communication("forbid", phases="backward"):
        loss = x.softmax(1).square().sum()
    error, kinds = sent(loss.backward)
    assert isinstance(error, CommunicationError)
    assert (error.phase, error.op, kinds) == ("backward", "aten._softmax_backward_data.default", [])
    assert "Redistribute the operands of the forward op" in str(error)
    assert "Write " not in str(error), "no program has the names of autograd's operands"


def test_what_to_do_about_a_backward_pass_can_be_done_in_a_program(two_ranks):
    two_ranks.run(backward_of_a_lowering)


def backward_elsewhere():
    """As autograd's own threads for other devices: they make no nodes, and enter nothing."""
    judged, free = loss_under("forbid")[0], loss_under("allow")[0]
    with sw.communication("forbid"):  # where backward is called does not count
        assert in_a_thread(free.backward)[1]
    error, kinds = in_a_thread(judged.backward)
    assert isinstance(error, CommunicationError)
    assert (error.phase, error.op, kinds) == ("backward", "aten.mm.default", [])


def test_a_backward_pass_in_another_thread_is_judged_by_its_forward_ops(two_ranks):
    two_ranks.run(backward_elsewhere)


def leaf_sums():
    def gradient(**conditions):
        weight = on_two(values(4, 4), R).requires_grad_()
        rows = on_two(values(8, 4, seed=1), Shard(0))
        with sw.communication("forbid", **conditions):
            loss = ((rows @ weight) ** 2).redistribute(placements=[Shard(0)]).sum(1)
            return sent(lambda: loss.redistribute(placements=[Shard(0)]).backward(torch.ones_like(loss)))

    assert gradient() == (None, ["all_reduce"])  # the layout of the leaf asks for it
    error, kinds = gradient(phases="gradients")
    assert isinstance(error, CommunicationError)
    assert (error.phase, kinds) == ("gradients", [])


def test_the_sum_of_a_leafs_gradient_is_a_phase_of_its_own(two_ranks):
    two_ranks.run(leaf_sums)


# -- modules, steps and plans ------------------------------------------------------------------------------------------


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 16, dtype=torch.float64)
        self.down = nn.Linear(16, 5, dtype=torch.float64)

    def forward(self, x, target):
        return functional.cross_entropy(self.down(torch.relu(self.up(x))), target)


def mlp(on, **options):
    model = sw.distribute_module(MLP(), on, {"up.*": [Shard(0)], "down.weight": [Shard(1)]}, **options)
    whole = [R] * on.ndim
    x = sw.distribute_tensor(values(8, 6), on, whole)
    return model, (x, sw.distribute_tensor(torch.arange(8) % 5, on, whole))


def modules():
    on = mesh((2,), ("tp",))
    model, inputs = mlp(on, communication="forbid")
    error, kinds = sent(lambda: model(*inputs))
    assert isinstance(error, CommunicationError)
    assert not kinds
    assert policy.in_force.stack == ()
    pending().relu()  # outside of the module all is allowed
    for of_backward in (sw.communication("forbid", phases="backward"), "forbid over tp phases backward"):
        model, inputs = mlp(on, communication=of_backward)
        loss, _ = sent(lambda: model(*inputs))  # noqa: B023  # it is called here
        assert isinstance(sent(loss.backward)[0], CommunicationError)
        assert policy.in_force.stack == ()


def test_a_module_has_a_policy(two_ranks):
    two_ranks.run(modules)


def modules_refuse_names():
    on = mesh((2,), ("tp",))
    model = MLP()
    before = list(model.parameters())
    for name, there in (("tq", ".*tp"), (7, "0")):
        scope = sw.communication("forbid", over=("tp", name))
        with pytest.raises(
            SettingsError, match=rf"distribute a MLP under .*: no mesh has a dim {name!r}; there are {there}"
        ):
            sw.distribute_module(model, on, {"up.*": [Shard(0)]}, communication=scope)
    assert all(one is same for one, same in zip(model.parameters(), before, strict=True))


def test_a_name_that_no_mesh_has_is_refused_before_a_module_is_placed(two_ranks):
    two_ranks.run(modules_refuse_names)


def on_a_submesh():
    inner = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))["inner"]
    later = init_device_mesh("cpu", (4,), mesh_dim_names=("later",))
    tall = sw.distribute_tensor(values(4, 6), inner, [Shard(1)])
    wide = sw.distribute_tensor(values(6, 4, seed=1), inner, [Shard(0)])
    for name in ("outer", *later.mesh_dim_names):
        with sw.communication("forbid", over=name):
            assert sent(partial(torch.relu, tall @ wide))[1] == ["reduce_scatter"], name
    model = sw.distribute_module(MLP(), inner, communication="forbid over outer")
    assert model.up.weight.placements == (R,)
    with pytest.raises(SettingsError, match="no mesh has a dim 'outr'"), sw.communication("forbid", over="outr"):
        (tall @ wide).relu()


def test_a_policy_may_name_a_dim_of_a_mesh_that_is_not_used_yet(pool):
    """That of the whole mesh where only a submesh is used, and that of another mesh which has yet to come."""
    pool.run(on_a_submesh)


def step_by(path):
    on = mesh((2,), ("tp",))
    model, inputs = mlp_by(path, on)
    optimizer = torch.optim.AdamW(model.parameters())
    with sw.communication("forbid"):
        model(*inputs).backward()
        optimizer.step()
    use_decisions(None)
    by_op, inputs = mlp(on)
    with sw.communication("forbid"):
        assert isinstance(sent(lambda: by_op(*inputs))[0], CommunicationError)


def mlp_by(path, on):
    torch.manual_seed(0)
    model = sw.distribute_module(MLP(), on, path)
    _, inputs = mlp(on)
    return model, inputs


@pytest.fixture(scope="module")
def planned():
    return sw.plan(partial(mlp, src_data_rank=None), (2,), ("tp",), fixed=("parameters",), name="mlp")


def test_what_a_plan_file_says_is_explicit(two_ranks, planned, tmp_path):
    planned.save(tmp_path / "mlp.plan")
    two_ranks.run(step_by, str(tmp_path / "mlp.plan"))


# -- compiled code ---------------------------------------------------------------------------------------------------


def compiled():
    torch._dynamo.reset()
    rows = on_two(values(4, 6), Shard(1))
    weight = on_two(values(6, 4, seed=1), Shard(0))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def product(x):
        return (x @ weight).relu()

    def under(action):
        with sw.communication(action):
            return product(rows)

    expected = product(rows).full_tensor()
    with pytest.raises(CommunicationError, match="relu"):
        under("forbid")
    torch.testing.assert_close(under("allow").full_tensor(), expected)
    torch.testing.assert_close(product(rows).full_tensor(), expected)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def inside(x):
        with sw.communication("forbid"):
            return x * 2

    with pytest.raises(TracingError, match="Enter it around the call of the compiled function"):
        inside(rows)
    assert policy.in_force.stack == ()


def test_compiled_code_is_made_anew_under_another_policy(two_ranks):
    two_ranks.run(compiled)


def under_forbid(plan):
    with sw.communication("forbid"):
        return sent(lambda: rehearse(partial(mlp, src_data_rank=None), (2,), ("tp",), plan=plan))[0]


def test_a_move_that_the_plan_does_not_have_is_forbidden(planned, tmp_path):
    planned.save(tmp_path / "mlp.plan")
    plan = read_plan(tmp_path / "mlp.plan")
    assert under_forbid(plan).collectives
    decisions = plan.decisions
    moving = [digest for digest, (one, *_) in decisions.exact.items() if one.inputs != one.sources or one.moves_results]
    assert moving
    for gone in moving:
        exact = {digest: known for digest, known in decisions.exact.items() if digest != gone}
        loose = {d: known for d, known in decisions.loose.items() if decisions.exact[gone][0] not in known}
        error = under_forbid(evolve(plan, decisions=evolve(decisions, exact=exact, loose=loose)))
        assert isinstance(error, CommunicationError)
        assert error.op == "aten._log_softmax.default"
