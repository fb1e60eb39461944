"""Bindings: a C function stands for an op only where it is proven to be that op."""

from __future__ import annotations

import pytest
import torch

from shardwise.engine import c_functions as bindings
from shardwise.engine.c_functions import binding
from shardwise.kernel.signature import signature
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import output_metas
from shardwise.private_torch.dispatch import recorded_ops
from shardwise.private_torch.ops import direct_call

aten = torch.ops.aten
X = torch.arange(16.0).view(4, 4)
INDEX = torch.tensor([1, 0])

CALLS = {
    "tensors": (aten.add.Tensor, (X, X), {}),
    "a number": (aten.add.Tensor, (X, 2.0), {}),
    "a keyword": (aten.add.Tensor, (X, X), {"alpha": 2}),
    "in place": (aten.mul_.Tensor, (X.clone(), 2.0), {}),
    "out": (aten.add.out, (X, X), {"out": torch.empty(4, 4)}),
    "a list of ints": (aten.sum.dim_IntList, (X, [1], True), {}),
    "a list of tensors": (aten.cat.default, ([X, X], 1), {}),
    "several results": (aten.native_layer_norm.default, (X, [4], None, None, 1e-5), {}),
    "a view": (aten.view.default, (X, [2, 8]), {}),
    "a 0-dim tensor": (aten.mul.Tensor, (X, X[1, 1]), {}),
    "indices": (aten.index.Tensor, (X, [INDEX]), {}),
    "lists in place": (aten._foreach_mul_.Tensor, ([X.clone(), X.clone()], X[1, 1]), {}),
    "another view of itself": (aten.squeeze_.dims, (X[:, None], [1]), {}),
    "a tensor like another": (aten.ones_like.default, (X,), {"pin_memory": False}),
    "a backward op": (aten.threshold_backward.default, (X, X, 0), {}),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_binding_makes_exactly_the_call_of_its_op(case):
    op, args, kwargs = CALLS[case]
    found = binding(op, args, kwargs)
    ops = recorded_ops(found, args, kwargs)
    assert [name for name, _, _ in ops] == [op]
    wanted = recorded_ops(direct_call(op), args, kwargs)
    assert repr(ops[0][1:]) == repr(wanted[0][1:])


def test_bindings_are_found_where_torch_has_them():
    assert binding(aten.add.Tensor, (X, X), {}) is torch.add
    assert binding(aten.mul_.Tensor, (X, 2.0), {}).__name__ == "mul_"


def test_a_call_that_raises_says_nothing_of_later_ones(monkeypatch):
    """Operands that have yet to be moved may not fit together."""
    monkeypatch.setattr(bindings, "_known", {})
    assert binding(aten.add.Tensor, (X, X[1:]), {}) is direct_call(aten.add.Tensor)
    assert binding(aten.add.Tensor, (X, X), {}) is torch.add
    assert binding(aten.add.Tensor, (X, X[1:]), {}) is torch.add


def test_a_function_that_takes_another_overload_is_refused():
    """torch.max(x, dim) and torch.max(x, y) share a name, and so do torch.div by a tensor and by a number."""
    assert recorded_ops(binding(aten.max.dim, (X, 1), {}), (X, 1), {})[0][0] is aten.max.dim
    assert binding(aten.max.other, (X, X), {}) is direct_call(aten.max.other)  # torch.max(x, y) makes maximum
    assert binding(aten.div.Scalar, (X, 2.0), {}) is direct_call(aten.div.Scalar)  # torch.div(x, 2.0) is div.Tensor


def test_the_binding_depends_on_what_the_parser_can_tell_apart():
    one = bindings._parser_type([X])
    assert one != bindings._parser_type([X, X])
    assert bindings._parser_type([X, X]) == bindings._parser_type([X] * 200)
    assert bindings._parser_type(X) != bindings._parser_type(X[0, 0]) != bindings._parser_type(INDEX[0])
    assert bindings._parser_type(1) != bindings._parser_type(1.0) != bindings._parser_type(True)
    assert bindings._parser_type(None) != bindings._parser_type(X)


def test_a_candidate_that_changes_an_argument_is_refused(monkeypatch):
    """One op reaches the dispatcher, the right one, but with other arguments."""

    def raised(x, low):
        return torch.clamp(x, low + 1)

    monkeypatch.setattr(bindings, "_candidates", lambda _: (raised,))
    assert bindings._find(aten.clamp.default, (X, 1.0), {}) is direct_call(aten.clamp.default)
    monkeypatch.setattr(bindings, "_candidates", lambda _: (torch.clamp,))
    assert bindings._find(aten.clamp.default, (X, 1.0), {}) is torch.clamp


def test_a_candidate_that_does_more_is_refused(monkeypatch):
    monkeypatch.setattr(bindings, "_candidates", lambda _: (lambda x: torch.neg(torch.neg(x)),))
    assert bindings._find(aten.neg.default, (X,), {}) is direct_call(aten.neg.default)


def test_a_candidate_is_never_tried_on_the_tensors_themselves():
    before = X.clone()
    bindings._find(aten.zero_.default, (X,), {})
    assert torch.equal(X, before)


@pytest.mark.parametrize("case", CALLS)
def test_where_the_results_are_known_the_binding_is_the_same_and_the_op_does_not_run(case, monkeypatch):
    op, args, kwargs = CALLS[case]
    results = output_metas(op, signature(op).bind(*_each(args, kwargs, lambda t: TensorMeta.of(t).to_meta_tensor())))
    calls = {"unknown": (args, kwargs, None), "known": (*_each(args, kwargs, TensorMeta.of), results)}
    found, ran = {}, {}
    for name, call in calls.items():
        monkeypatch.setattr(bindings, "_known", {})
        ops = recorded_ops(lambda call=call, name=name: found.update({name: binding(op, *call)}), (), {})
        ran[name] = op in [one for one, _, _ in ops]
    assert found["known"] is found["unknown"]
    assert ran == {"unknown": True, "known": False}


def _each(args, kwargs, change):
    def of(value):
        if isinstance(value, torch.Tensor):
            return change(value)
        return [of(v) for v in value] if isinstance(value, list) else value

    return [of(v) for v in args], {name: of(v) for name, v in kwargs.items()}
