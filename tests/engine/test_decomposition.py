"""Ops without a rule: decomposed by torch where every part has one, on whole tensors where asked for, else refused."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch._decomp import register_decomposition
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.discovery.process import default_registry, use_registry
from shardwise.engine import plain_tensors
from shardwise.engine.decomposition import Decomposition, Failed, decompose, formulas, stand_ins
from shardwise.errors import InPlaceError, LayoutError, NoRuleError, UnknownOpWarning
from shardwise.kernel import dispatcher
from shardwise.kernel.precedence import Origin
from shardwise.kernel.registry import Registrar, Registry
from shardwise.kernel.signature import op_name
from shardwise.private_torch.ops import functional_of
from shardwise.testing import mesh

aten = torch.ops.aten


@contextmanager
def only(*names, unknown_ops="refuse"):
    """A registry with the first-party rules of these ops (without overload) alone."""
    registry, registrar = Registry(unknown_ops=unknown_ops), Registrar(Origin("some"))
    for entry in default_registry().ops():
        if op_name(entry.op).split(".")[1] in names and entry.op not in registrar._by_op:
            registrar._by_op[entry.op] = entry
    registry.accept(registrar)
    with use_registry(registry):
        yield registry


@contextmanager
def world(ranks=4):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def on(mesh_, tensor, *placements):
    return sw.distribute_tensor(tensor, mesh_, placements, src_data_rank=None)


def found(registry, op, *args, **kwargs):
    return decompose(registry, op, stand_ins(args, {}), stand_ins(kwargs, {}))


x, y = torch.arange(24.0).view(8, 3), torch.linspace(-1, 1, 24).view(8, 3)


# -- which way goes --------------------------------------------------------------------------------------------------


def test_an_op_is_decomposed_when_every_part_has_a_rule():
    with only("mul", "add") as registry:
        way = found(registry, aten.addcmul.default, x, y, y, value=2)
        assert isinstance(way, Decomposition)
        assert set(way.parts) <= {aten.mul.Tensor, aten.add.Tensor, aten.mul.Scalar}
        assert way.text.startswith("decomposed into aten.")


def test_a_part_without_a_rule_is_decomposed_in_its_turn():
    """aten._safe_softmax ends in a softmax, which is decomposed again."""
    parts = ("amax", "sub", "exp", "sum", "div", "eq", "all", "zeros_like", "where", "scalar_tensor", "full_like")
    with only(*parts) as registry:
        way = found(registry, aten._safe_softmax.default, x, 1)
        assert isinstance(way, Decomposition)
        assert {aten.exp.default, aten.amax.default} <= set(way.parts)
        assert aten._softmax.default not in way.parts


def test_what_is_missing_is_named():
    with only("mul") as registry:
        failed = found(registry, aten.addcmul.default, x, y, y)
        assert isinstance(failed, Failed)
        assert aten.mul.Tensor in failed.parts
        assert failed.missing == (aten.add.Tensor,)
        assert "no rule for aten.add.Tensor" in failed.text


def test_an_op_that_draws_is_not_decomposed():
    failed = found(default_registry(), aten.rrelu_with_noise.default, x, x, 0.1, 0.3, True)
    assert isinstance(failed, Failed)
    assert "random" in failed.text


def test_a_call_that_torch_refuses_raises_what_torch_raises():
    with only("mul", "add") as registry, pytest.raises(RuntimeError, match=r"must match|broadcast"):
        found(registry, aten.addcmul.default, x, y[:5], y[:3])


# -- planted decompositions that must be refused ---------------------------------------------------------------------

LIBRARY = torch.library.Library("acme_parts", "DEF")


def planted(name, schema, function, meta):
    """An op that torch's table decomposes by ``function``, and whose results are as ``meta`` says."""
    LIBRARY.define(f"{name}{schema}")
    LIBRARY.impl(name, meta, "Meta")
    op = getattr(torch.ops.acme_parts, name).default
    register_decomposition(op)(function)
    return op


PLANTED = {
    "returns": planted("shorter", "(Tensor x) -> Tensor", lambda x: x.sum(0), torch.empty_like),
    "views": planted("alias", "(Tensor x) -> Tensor", lambda x: x.view(-1).view(x.shape), torch.empty_like),
    "leaves alone": planted("scribble", "(Tensor x) -> Tensor", lambda x: x.mul_(2) + 1, torch.empty_like),
    "does not write": planted("idle", "(Tensor(a!) x) -> Tensor(a!)", lambda x: x * 2, lambda x: x),
    "without data": planted("peeking", "(Tensor x) -> Tensor", lambda x: x * x.sum().item(), torch.empty_like),
    "random": planted("noisy", "(Tensor x) -> Tensor", lambda x: x + torch.rand(x.shape[1]), torch.empty_like),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_decomposition_that_differs_from_its_op_is_refused(fault):
    failed = found(default_registry(), PLANTED[fault], x.clone())
    assert isinstance(failed, Failed)
    assert ("aten.rand.default" if fault == "random" else fault) in failed.text


MASKED = planted(
    "masked",
    "(Tensor x) -> Tensor",
    lambda x: x * (torch.arange(x.shape[1], device=x.device) > 0),
    torch.empty_like,
)


TWICE = planted("twice", "(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
LIBRARY.define("twice_(Tensor(a!) x) -> Tensor(a!)")
LIBRARY.impl("twice_", lambda x: x, "Meta")


def test_without_an_own_decomposition_an_in_place_op_is_its_functional_form_and_a_copy():
    way = found(default_registry(), torch.ops.acme_parts.twice_.default, x.clone())
    assert way.text == "decomposed into aten.mul.Tensor, aten.copy_.default (acme_parts.twice.default and a copy)"


def test_an_in_place_view_is_no_copy():
    """The copy of a square's transpose over itself would have the shape and be wrong."""
    assert all("copy" not in formula.name for formula in formulas(aten.transpose_.default))
    assert functional_of(aten.mul_.Tensor) is aten.mul.Tensor
    assert functional_of(aten.max.dim_max) is aten.max.dim


# -- running it ------------------------------------------------------------------------------------------------------


def test_results_are_those_of_one_device_and_the_plan_says_so():
    with world() as four, only("mul", "add"):
        a, b = on(four, x, Shard(0)), on(four, y, Shard(0))
        plans = []
        with dispatcher.observe(plans.append):
            result = torch.addcmul(a, b, b, value=2)
        torch.testing.assert_close(result.to_local(), torch.addcmul(x, y, y, value=2)[:2])
        assert result.placements == (Shard(0),)
        assert "aten.addcmul.default: decomposed into aten.mul.Tensor" in repr(plans[0])
        assert [op_name(plan.schema.op) for plan in plans[1:]] == [
            "aten.mul.Tensor",
            "aten.mul.Tensor",
            "aten.add.Tensor",
        ]


def test_a_view_in_place_changes_the_tensor_itself():
    with world() as four:
        a = on(four, torch.arange(8.0).view(8, 1), Shard(0))
        base = a.to_local()
        assert a.squeeze_(1) is a
        assert (a.shape, a.stride(), a.placements) == ((8,), (1,), (Shard(0),))
        a.unsqueeze_(0).mul_(2)
        assert torch.equal(a.to_local(), torch.tensor([[0.0, 2.0]]))
        assert torch.equal(base, torch.tensor([[0.0], [2.0]]))
        assert a.transpose_(0, 1).placements == (Shard(0),)
        leaf = on(four, torch.ones(8, 1), Shard(0)).requires_grad_()
        (leaf * 2).squeeze_(1).sum().backward()
        assert torch.equal(leaf.grad.to_local(), torch.full((2, 1), 2.0))
        moved = on(four, torch.zeros(1, 8), Shard(0))
        assert moved.squeeze_(0).mul_(2) is moved
        assert (moved.shape, moved.placements) == ((8,), (Shard(0),))


def test_an_op_is_tried_once_for_each_signature(monkeypatch):
    from shardwise.engine import no_rule as unknown

    tried = []
    monkeypatch.setattr(unknown, "decompose", lambda *args: tried.append(args) or decompose(*args))
    with world() as four, only("mul", "add"):
        a = on(four, x, Shard(0))
        for _ in range(3):
            torch.addcmul(a, a, a)
        assert len(tried) == 1
        torch.addcmul(a, a, a, value=3)
        assert len(tried) == 2


def test_a_written_operand_is_written_where_it_lies():
    with world() as four, only("mul", "add", "copy_"):
        a, b = on(four, x, Shard(0)), on(four, y, Shard(0))
        local = a.to_local()
        assert a.addcmul_(b, b) is a
        torch.testing.assert_close(local, torch.addcmul(x, y, y)[:2])
        out = on(four, torch.zeros(8, 3), Shard(0))
        assert torch.addcmul(b, b, b, out=out) is out
        torch.testing.assert_close(out.to_local(), torch.addcmul(y, y, y)[:2])


def test_a_plain_tensor_that_is_overwritten_is_not_compared(monkeypatch):
    compared = []
    monkeypatch.setattr(plain_tensors, "_compare", lambda _asked, tensors, _mesh: compared.extend(tensors))
    with world() as four, only("mul", "add", "copy_"):
        a, out = on(four, x, Replicate()), torch.full((8, 3), torch.nan)
        torch.addcmul(a, a, a, out=out)
        torch.testing.assert_close(out, torch.addcmul(x, x, x))
        assert not compared
        torch.addcmul(a, a, torch.ones(3))
        assert compared


def test_tensors_that_a_decomposition_makes_lie_on_the_mesh():
    with world() as four:
        result = MASKED(on(four, x, Shard(1)))
        assert torch.equal(result.full_tensor().flatten()[:1], torch.zeros(1))
        assert result.to_local().shape == (8, 1)
        product = on(four, x, Shard(1)) * torch.ones(3)
        assert torch.equal(product.to_local(), x[:, :1])


def test_refusals_name_the_parts_and_the_page_of_remedies():
    with world() as four, only("mul"):
        a = on(four, x, Shard(0))
        with pytest.raises(NoRuleError, match=r"no rule for aten\.add\.Tensor.*unknown-ops") as refusal:
            torch.addcmul(a, a, a)
        assert refusal.value.missing == ("aten.add.Tensor",)
        with pytest.raises(NoRuleError):
            torch.addcmul(a, a, a)


@torch.library.custom_op("acme_parts::asserts", mutates_args=())
def asserts(value: torch.Tensor) -> torch.Tensor:
    return value.clone()


@asserts.register_fake
def _(_):
    msg = "memory INTERNAL ASSERT FAILED at somewhere.cpp:1, please report a bug"
    raise RuntimeError(msg)


def test_an_op_that_cannot_run_without_data_is_refused():
    """Torch's own words for it, a failed assertion of its C++, are no answer to the program."""
    with world() as four:
        a = on(four, x, Shard(0))
        with pytest.raises(NoRuleError, match=r"run acme_parts\.asserts"):
            asserts(a)
        with pytest.raises(LayoutError, match=r"run aten\._nested_tensor_from_tensor_list.* parts of several lengths"):
            torch.nested.nested_tensor([a, a])
        with pytest.raises(RuntimeError, match=r"size of tensor a \(8\) must match"):  # what one device says
            torch.ops.aten.addcmul(a, a, on(four, y[:5], Shard(0)))


# -- on whole tensors ------------------------------------------------------------------------------------------------


@torch.library.custom_op("acme_parts::sorted_by_sum", mutates_args=())
def sorted_by_sum(value: torch.Tensor) -> torch.Tensor:
    return value[value.sum(1).argsort(descending=True)].clone()


@sorted_by_sum.register_fake
def _(value):
    return torch.empty_like(value)


@torch.library.custom_op("acme_parts::reverse_", mutates_args=("value",))
def reverse_(value: torch.Tensor, by: torch.Tensor) -> None:
    value.copy_(value.flip(0) * by)


def refused_unless_asked():
    """On one rank: without the context refused, with it the numbers of one device, and one warning for each line."""
    grid = mesh((4,))
    a = sw.distribute_tensor(x, grid, [Shard(0)])
    with pytest.raises(NoRuleError, match="unknown-ops"):
        sorted_by_sum(a)
    with warnings.catch_warnings(record=True) as told, sw.replicate_unknown():
        warnings.simplefilter("always")
        for _ in range(3):
            first = sorted_by_sum(a)
        second = sorted_by_sum(first)
    with pytest.raises(NoRuleError):
        sorted_by_sum(a)
    sites = [(w.filename == __file__, w.category is UnknownOpWarning) for w in told]
    return (
        first.placements,
        first.to_local(),
        second.to_local(),
        sites,
        str(told[0].message),
        len({w.lineno for w in told}),
    )


def test_an_unknown_op_runs_replicated_only_when_asked(pool):
    for placements, first, second, sites, message, lines in pool.run(refused_unless_asked):
        assert placements == (Replicate(),)
        assert torch.equal(first, sorted_by_sum(x))
        assert torch.equal(second, sorted_by_sum(x))
        assert sites == [(True, True), (True, True)]
        assert lines == 2
        assert "96 bytes are gathered" in message


@torch.library.custom_op("acme_parts::of_positive", mutates_args=())
def of_positive(value: torch.Tensor) -> torch.Tensor:
    return value[value.sum(1) > 0].clone()


of_positive.register_fake(lambda value: value.new_empty(torch.library.get_ctx().new_dynamic_size(), value.shape[1]))


def test_an_unknown_op_whose_shapes_depend_on_data_is_refused_as_the_others_are():
    with world() as four, only():
        a = on(four, x - 8, Replicate())
        with pytest.raises(NoRuleError, match=r"acme_parts\.of_positive"):
            of_positive(a)
        with sw.replicate_unknown(), pytest.warns(UnknownOpWarning):
            assert torch.equal(of_positive(a).to_local(), of_positive(x - 8))


def written_replicated():
    grid, results = mesh((2, 2)), []
    with warnings.catch_warnings(), sw.replicate_unknown():
        warnings.simplefilter("ignore")
        for places in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Replicate(), Replicate()]):
            a, b = sw.distribute_tensor(x, grid, places), sw.distribute_tensor(y, grid, [Shard(0), Shard(1)])
            local = a.to_local()
            reverse_(a, b)
            results.append((a.placements == tuple(places), torch.equal(a.to_local(), local), a.full_tensor()))
    return results


def test_what_an_unknown_op_writes_goes_back_to_where_it_lay(pool):
    for results in pool.run(written_replicated):
        for stays, same, whole in results:
            assert stays
            assert same
            assert torch.equal(whole, x.flip(0) * y)


def test_random_numbers_are_refused_even_when_asked():
    with world() as four, only(unknown_ops="replicate"), pytest.raises(NoRuleError, match="random"):
        torch.bernoulli(on(four, x / 24, Shard(0)))


def test_the_context_goes_before_the_setting():
    with world() as four, only(unknown_ops="replicate"):
        a = on(four, x, Replicate())
        with pytest.warns(UnknownOpWarning, match="aten.sin.default"):
            assert torch.equal(torch.sin(a).to_local(), x.sin())
        with sw.replicate_unknown(False), pytest.raises(NoRuleError):
            torch.sin(a)


def asked_on_one_rank():
    a = sw.distribute_tensor(x, mesh((4,)), [Shard(0)])
    with sw.replicate_unknown(dist.get_rank() == 2):
        try:
            sorted_by_sum(a)
        except sw.ShardingError as error:
            return type(error).__name__, str(error)
    return "ran", ""


def test_ranks_that_ask_differently_all_raise(pool):
    for name, message in pool.run(asked_on_one_rank):
        assert name == "RankDisagreementError"
        assert "replicated on rank 2" in message


def test_a_view_of_what_would_be_gathered_is_not_written():
    with world() as four, only("copy_", "mul", unknown_ops="replicate"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        row = on(four, x, Replicate())[0]
        row.mul_(2)
        assert torch.equal(row.to_local(), x[0] * 2)
        shard = on(four, x.clone(), Shard(0))[0]
        with pytest.raises(InPlaceError):
            shard.mul_(2)


def test_partial_operands_are_reduced_first():
    with world() as four, only(unknown_ops="replicate"):
        a = sw.MeshTensor.from_local(x, four, [Partial()])
        with pytest.warns(UnknownOpWarning):
            result = torch.sin(a)
        assert result.placements == (Replicate(),)
