"""Plain tensors among MeshTensors: whole where the ranks agree, an error on every rank where they do not."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.comm.contents import digest
from shardwise.comm.events import observe
from shardwise.engine import plain_tensors
from shardwise.errors import PlainTensorError, RankDisagreementError, SettingsError
from shardwise.kernel import known_tensors
from shardwise.testing import mesh


def values(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape).sin()


def on(full, *layout):
    return sw.distribute_tensor(full, mesh((dist.get_world_size(),)), layout)


def equal(found, wanted):
    torch.testing.assert_close(found.full_tensor() if isinstance(found, MeshTensor) else found, wanted)


def comparisons(call):
    """How often the ranks compare plain tensors during a call."""
    before, count = plain_tensors.different_summaries, []
    plain_tensors.different_summaries = lambda *args: count.append(1) or before(*args)
    try:
        call()
    finally:
        plain_tensors.different_summaries = before
    return len(count)


# -- operands ------------------------------------------------------------------------------------------------------

OPERANDS = {
    "right": lambda x, p: x + p,
    "left": lambda x, p: p - x,
    "where": lambda x, p: torch.where(x > 0, x, p),
    "mask": lambda x, p: torch.where(p > 0, x, 0.0),
    "matmul": lambda x, p: x @ p.reshape(4, 1),
    "cat": lambda x, p: torch.cat([x, p.reshape(1, 4), x]),
    "stack": lambda x, p: torch.stack([x[0], p]),
    "index": lambda x, _: x[torch.tensor([3, 1])],
    "index twice": lambda x, _: x[torch.tensor([3, 1]), torch.tensor([0, 2])],
    "gather": lambda x, _: x.gather(1, torch.tensor([[0, 3]] * 8)),
    "take": lambda x, _: x.take(torch.tensor([5, 31])),
    "embedding": lambda x, _: nn.functional.embedding(torch.tensor([1, 7, 7]), x),
    "foreach": lambda x, p: torch.cat([t.reshape(-1) for t in torch._foreach_mul([x, p], [p, p])]),
    "einsum": lambda x, p: torch.einsum("ij,j->i", x, p),
    "number": lambda x, p: x * torch.tensor(2.0) + p.sum(),
    "norm": lambda x, p: nn.functional.layer_norm(x, (4,), p, p),
    "decomposed": lambda x, p: torch.addcmul(x, x, p),
    "composite": lambda x, p: torch.quantile(x, p[:1].abs().clamp(0, 1), dim=1),
}


def operand(name, layout):
    x, p = values(8, 4), values(4)
    equal(OPERANDS[name](on(x, layout), p), OPERANDS[name](x, p))


@pytest.mark.parametrize("name", OPERANDS)
def test_a_plain_operand_counts_as_whole(two_ranks, name):
    for layout in (Shard(0), Shard(1), Replicate()):
        two_ranks.run(operand, name, layout)


DIFFERENT = {
    "operand": lambda x, p: x + p,
    "in a list": lambda x, p: torch.cat([x, p.reshape(1, 4)]),
    "written": lambda x, p: p.add_(x[0]),
    "number": lambda x, p: x + p[0],
    "in one bit": lambda x, _: x + (torch.zeros(4) * (1 - 2 * dist.get_rank())),
    "shape": lambda x, _: x + torch.zeros(8 if dist.get_rank() else 1, 4),
    "composite": lambda x, p: torch.quantile(x, p.abs() / 10, dim=1),
}


def different(name):
    x, p = on(values(8, 4), Shard(0)), torch.full((4,), 1.0 + dist.get_rank())
    for _ in range(2):
        with pytest.raises(RankDisagreementError) as caught:
            DIFFERENT[name](x, p)
    return str(caught.value)


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_of_ranks_that_differ_are_an_error_on_every_rank(two_ranks, name):
    for said in two_ranks.run(different, name):
        assert "on rank 0" in said
        assert "on rank 1" in said
        assert "test_plain_tensors.py:" in said
        assert "from_local" in said


def products_without_addend():
    rank = float(dist.get_rank())
    x, wanted = values(4, 4), values(4, 4) @ values(4, 4)
    for layout in (Shard(0), Shard(1), Replicate()):
        placed = on(x, layout)
        for addend in (torch.full((4, 4), rank), torch.full((4, 4), float("nan") if rank else 0.0)):
            equal(torch.addmm(addend, placed, placed, beta=0), wanted)
            again = sw.distribute_tensor(x, mesh((1, dist.get_world_size())), [Replicate(), layout])
            equal(torch.addmm(addend, again, again, beta=0), wanted)  # known of one mesh is not known of another
            equal(torch.baddbmm(addend[None], placed[None], placed[None], beta=0.0)[0], wanted)
            equal(torch.addmv(addend[0], placed, placed[0], beta=0), x @ x[0])
        out = torch.full((4, 4), rank)
        for _ in range(2):
            torch.addmm(out, placed, placed, beta=0.0, out=out)
            equal(out, wanted)
        equal(placed + out, x + wanted)  # it is known from here on
        with pytest.raises(RankDisagreementError):
            torch.addmm(torch.full((4, 4), rank), placed, placed)
        with pytest.raises(RankDisagreementError):
            torch.addmm(torch.zeros(4, 4), placed, torch.full((4, 4), rank), beta=0)


def test_an_addend_that_is_not_read_may_differ(two_ranks):
    """Programs give memory from ``torch.empty`` there."""
    two_ranks.run(products_without_addend)


# -- when ranks compare --------------------------------------------------------------------------------------------


def compares_once():
    x, p = on(values(8, 4), Shard(0)), values(4)
    assert comparisons(lambda: x + p) == 1
    assert comparisons(lambda: [x + p, x * p, torch.cat([x, p[None]])]) == 0  # p[None] is a view of it
    p.mul_(2)
    assert comparisons(lambda: x + p) == 1
    p.data = values(4)
    assert comparisons(lambda: x + p) == 1
    assert comparisons(lambda: x + p.clone()) == 1
    assert comparisons(lambda: torch._foreach_add([x, x, x], [values(4), values(4), values(4)])) == 1
    # What is written by MeshTensors is the same on every rank.
    cache = torch.zeros(8, 4)
    assert comparisons(lambda: cache.index_copy_(0, torch.tensor([0, 1]), x[:2])) == 2
    assert comparisons(lambda: [cache.add_(x), cache + x, cache[2:4].add_(x[2:4]), x + cache]) == 0
    equal(cache, torch.cat([values(8, 4)[:2], torch.zeros(6, 4)]) + values(8, 4) + _rows(values(8, 4)))
    # Memory that is overwritten may hold anything.
    assert comparisons(lambda: torch.add(x, x, out=torch.full((8, 4), float(dist.get_rank())))) == 0
    assert comparisons(lambda: torch.full((8, 4), float(dist.get_rank())).copy_(x)) == 0
    with sw.plain("replicate"):
        assert comparisons(lambda: x + values(4)) == 0


def _rows(full):
    only = torch.zeros_like(full)
    only[2:4] = full[2:4]
    return only


def test_ranks_compare_a_tensor_once_and_again_when_it_was_written(two_ranks):
    two_ranks.run(compares_once)


def compares_always():
    x, p = on(values(8, 4), Shard(0)), values(4)
    settings = plain_tensors._settings
    plain_tensors._settings = lambda: sw.settings.Settings(check_ranks=True)
    try:
        assert comparisons(lambda: [x + p, x + p]) == 2
    finally:
        plain_tensors._settings = settings


def test_the_setting_compares_at_each_use(two_ranks):
    two_ranks.run(compares_always)


def forgets():
    x = on(values(8, 4), Shard(0))
    known_tensors.forget_known_tensors()
    for _ in range(5):
        x + values(4)
    gc.collect()
    assert not known_tensors._known
    assert not known_tensors.known_without_mesh


def test_a_tensor_that_is_gone_is_forgotten(two_ranks):
    two_ranks.run(forgets)


def forgets_a_write_that_failed():
    x, cache, short = on(values(8, 4), Shard(0)), torch.zeros(8, 4), torch.zeros(3)
    cache + x
    with pytest.raises(Exception, match="index"):
        cache.index_copy_(0, torch.tensor([0, 9]), x[:2])
    cache.add_(1)
    assert comparisons(lambda: cache + x) == 1
    with pytest.raises(RuntimeError):
        short.add_(x)
    short.add_(1)
    assert comparisons(lambda: x[0, 0] + short) == 1


def test_a_write_that_failed_hides_no_other(two_ranks):
    two_ranks.run(forgets_a_write_that_failed)


def handlers_know_again():
    with pytest.MonkeyPatch.context() as patch:  # where no test before has used another mesh
        patch.setattr(plain_tensors, "_meshes", plain_tensors._Meshes())
        x, p = on(values(8, 4), Shard(0)), values(4)
        x + p
        assert id(p) in known_tensors.known_without_mesh
        with sw.plain("replicate"):
            pass
        x + p
        assert id(p) in known_tensors.known_without_mesh


def test_a_scope_leaves_what_handlers_know(two_ranks):
    two_ranks.run(handlers_know_again)


def compares_on_the_mesh_of_the_call():
    both = mesh((2, 1), ("a", "b"))
    number = sw.distribute_tensor(torch.tensor(2.0), both["b"], [Replicate()])
    wide = sw.distribute_tensor(values(8, 4), both["a"], [Shard(0)])
    equal(torch.where(number > 0, torch.ones(4), wide), torch.ones(8, 4))
    with pytest.raises(RankDisagreementError, match=r"on rank 0.*on rank 1"):  # with a plan that is there already
        torch.where(number > 0, torch.full((4,), float(dist.get_rank())), wide)


def test_ranks_of_the_mesh_on_which_the_call_runs_compare(two_ranks):
    two_ranks.run(compares_on_the_mesh_of_the_call)


# -- policies ------------------------------------------------------------------------------------------------------


def refuses():
    x, p = on(values(8, 4), Shard(0)), values(4)
    with sw.plain("refuse"):
        with pytest.raises(PlainTensorError, match=r"test_plain_tensors\.py:\d+.*'other' is a Tensor of shape \(4,\)"):
            x + p
        with pytest.raises(PlainTensorError, match=r"'tensors\[1\]'"):
            torch.cat([x, p[None]])
        equal(x + torch.tensor(1.0), values(8, 4) + 1)
        with sw.plain("compare"):
            equal(x + p, values(8, 4) + p)
    with sw.plain("replicate"):
        part = x + torch.full((4,), float(dist.get_rank()))
    assert torch.equal(part.to_local(), x.to_local() + dist.get_rank())


def test_a_scope_refuses_or_believes(two_ranks):
    two_ranks.run(refuses)


def test_another_policy_is_an_error():
    with pytest.raises(SettingsError, match="compare, replicate, refuse"), sw.plain("whole"):
        pass


def others():
    x = on(values(8, 4), Shard(0))
    with pytest.raises(PlainTensorError, match=r"torch\.sparse_coo"):
        x + torch.eye(4).to_sparse()[:, 0]


def test_what_has_no_elements_in_memory_is_refused(two_ranks):
    two_ranks.run(others)


# -- gradients -----------------------------------------------------------------------------------------------------


def trains(layout):
    x, w, b = values(8, 4).double(), values(4, 4).double(), values(4).double()
    both = []
    for data in (on(x, layout), x):
        weight, bias = nn.Parameter(w.clone()), nn.Parameter(b.clone())
        placed = on(w, Shard(0)).requires_grad_() if isinstance(data, MeshTensor) else w.clone().requires_grad_()
        optimizer = torch.optim.AdamW([weight, bias, placed], lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            low = weight @ (2 * weight)  # a plain graph before the mesh
            (nn.functional.linear(data, low, bias) @ placed).square().sum().backward()
            optimizer.step()
        if isinstance(data, MeshTensor):
            assert type(weight.grad) is type(bias.grad) is torch.Tensor
        both.append([weight, bias, weight.grad, bias.grad, placed, placed.grad])
    for found, wanted in zip(*both, strict=True):
        equal(found, wanted)
    twin = copy.deepcopy(bias)
    assert not twin.__dict__
    assert pickle.loads(pickle.dumps(twin)) is not None


@pytest.mark.parametrize("layout", [Shard(0), Shard(1), Replicate()], ids=str)
def test_a_plain_parameter_gets_a_plain_whole_gradient(two_ranks, layout):
    two_ranks.run(trains, layout)


# -- contents ------------------------------------------------------------------------------------------------------

SAME = [
    torch.zeros(0),
    values(5),
    values(7, 3).t(),
    values(6)[::2],
    torch.tensor([True, False, True]),
    values(3).to(torch.bfloat16),
    torch.complex(values(3), values(3)).conj(),
    torch.arange(5, dtype=torch.uint8),
    torch.tensor([float("nan"), float("inf"), -0.0]),
    values(1).expand(1).as_strided((1,), (0,)),
    values(3)[::3],
]


@pytest.mark.parametrize("index", range(len(SAME)))
def test_equal_contents_have_one_digest(index):
    assert digest(SAME[index]) == digest(SAME[index].clone(memory_format=torch.contiguous_format))


def test_another_element_order_or_sign_of_zero_has_another_digest():
    found = {digest(values(5)[torch.tensor(order)]) for order in ([0, 1, 2, 3, 4], [1, 0, 2, 3, 4], [0, 1, 2, 4, 3])}
    found |= {digest(torch.zeros(3)), digest(-torch.zeros(3)), digest(torch.zeros(5))}
    one_two_one = torch.tensor([1, -2, 1])
    found |= {digest(torch.arange(3)), digest(torch.arange(3) + one_two_one)}
    assert len(found) == 8


def test_long_contents_are_read_in_pieces(monkeypatch):
    long = values(100, 7)
    whole = digest(long)
    monkeypatch.setattr("shardwise.comm.contents._WORDS", 16)
    assert digest(long) == whole


def test_collectives_of_a_comparison_are_not_those_of_an_op(two_ranks):
    two_ranks.run(_unobserved)


def _unobserved():
    x, events = on(values(8, 4), Replicate()), []
    with observe(events.append):
        x + values(4)
    assert not events
