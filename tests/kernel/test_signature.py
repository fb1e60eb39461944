"""Signatures: what is read from op schemas, and calls as rules see them."""

import pytest
import torch
from torch.utils._pytree import tree_map

from shardwise.errors import RuleError
from shardwise.kernel.signature import ByType, Call, Kind, op_name, scalar_type, signature
from shardwise.kernel.tensor_meta import TensorMeta

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return TensorMeta.contiguous(shape, dtype)


def kinds(op):
    return {a.name: a.kind for a in signature(op).args}


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (aten.mm.default, {"self": Kind.TENSOR, "mat2": Kind.TENSOR}),
        (aten.add.Tensor, {"self": Kind.TENSOR, "other": Kind.TENSOR, "alpha": Kind.BY_TYPE}),
        (aten.sum.dim_IntList, dict.fromkeys(["dim", "keepdim", "dtype"], Kind.BY_VALUE) | {"self": Kind.TENSOR}),
        (aten.cat.default, {"tensors": Kind.TENSORS, "dim": Kind.BY_VALUE}),
        (aten.index.Tensor, {"self": Kind.TENSOR, "indices": Kind.TENSORS}),
        (aten.bernoulli.default, {"self": Kind.TENSOR, "generator": Kind.BY_TYPE}),
        (aten._foreach_add.ScalarList, {"self": Kind.TENSORS, "scalars": Kind.BY_TYPE}),
        (aten.clamp.default, {"self": Kind.TENSOR, "min": Kind.BY_TYPE, "max": Kind.BY_TYPE}),
        (aten.clamp.Tensor, {"self": Kind.TENSOR, "min": Kind.TENSOR, "max": Kind.TENSOR}),
    ],
)
def test_kinds_follow_from_the_schema_types(op, expected):
    assert kinds(op) == expected


def test_out_and_written_arguments():
    by_name = {a.name: a for a in signature(aten.add.out).args}
    assert (by_name["out"].is_out, by_name["out"].written, by_name["out"].kwarg_only) == (True, True, True)
    assert (by_name["self"].is_out, by_name["self"].written) == (False, False)
    assert [a.name for a in signature(aten.add.out).tensor_args] == ["self", "other", "out"]
    assert signature(aten.add_.Tensor).args[0].written


@pytest.mark.parametrize(
    ("op", "alias", "written"),
    [
        (aten.add_.Tensor, 0, True),
        (aten.add.out, 3, True),
        (aten.t.default, 0, False),
        (aten.split.Tensor, 0, False),
        (aten.mm.default, None, False),
    ],
)
def test_results_know_the_argument_that_they_are(op, alias, written):
    (result,) = signature(op).results
    assert (result.alias, result.written, result.is_tensor) == (alias, written, True)
    assert result.is_list == (op is aten.split.Tensor)


def test_results_that_are_no_tensors():
    assert [r.is_tensor for r in signature(aten.equal.default).results] == [False]
    assert signature(aten._foreach_add_.List).results == ()


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "values"),
    [
        (aten.add.Tensor, ("x", "y"), {}, ["x", "y", 1]),
        (aten.add.Tensor, ("x",), {"other": "y", "alpha": 2}, ["x", "y", 2]),
        (aten.sum.dim_IntList, ("x", [0]), {"dtype": torch.int64}, ["x", [0], False, torch.int64]),
    ],
)
def test_bind_fills_in_defaults_and_unbind_takes_apart(op, args, kwargs, values):
    described = signature(op)
    assert described.bind(args, kwargs) == values
    positional, keywords = described.unbind(values)
    assert described.bind(positional, keywords) == values
    assert set(keywords) == {a.name for a in described.args if a.kwarg_only}


def test_unbound_values_run_the_op():
    values = signature(aten.add.Tensor).bind((torch.ones(3), torch.ones(3)), {"alpha": 3})
    args, kwargs = signature(aten.add.Tensor).unbind(values)
    assert aten.add.Tensor(*args, **kwargs).tolist() == [4.0, 4.0, 4.0]


def test_a_signature_is_read_once():
    assert signature(aten.mm.default) is signature(aten.mm.default)
    assert signature(aten.mm.default).name == op_name(aten.mm.default) == "aten.mm.default"
    assert signature(aten.mm.default).index("mat2") == 1
    assert signature(aten.mm.default).index("nothing") is None


# -- calls -------------------------------------------------------------------------------------------------------


def call(op, *args, outputs=()):
    values = signature(op).bind(args, {})
    values = tree_map(tuple, values, is_leaf=lambda v: isinstance(v, list))
    return Call(op, dict(zip((a.name for a in signature(op).args), values, strict=True)), tuple(outputs))


def test_operands_are_flat_and_leave_out_out():
    cat = call(aten.cat.default, (meta(2, 3), meta(4, 3)), 0, outputs=[meta(6, 3)])
    assert cat.operands == (meta(2, 3), meta(4, 3))
    assert cat.operand_names == ("tensors[0]", "tensors[1]")
    assert str(cat) == "aten.cat.default(f32[2,3], f32[4,3])"
    out = Call(aten.exp.out, {"self": meta(2), "out": meta(2)}, (meta(2),))
    assert out.operands == out.out_operands == (meta(2),)
    assert out.operand_names == ("self",)


def test_an_absent_operand_is_none():
    index = Call(aten.index.Tensor, {"self": meta(4, 5), "indices": (None, meta(3, dtype=torch.int64))}, (meta(4, 3),))
    assert index.operands[1] is None
    assert str(index) == "aten.index.Tensor(f32[4,5], -, i64[3])"
    clamp = Call(aten.clamp.Tensor, {"self": meta(2), "min": None, "max": meta(2)}, (meta(2),))
    assert clamp.operands == (meta(2), None, meta(2))


def test_a_position_of_zipped_lists():
    op = aten._foreach_addcdiv.Scalar
    lists = {name: (meta(2), meta(3, 4)) for name in ("self", "tensor1", "tensor2")}
    zipped = Call(op, {**lists, "value": 1}, (meta(2), meta(3, 4)))
    assert zipped.length == 2
    second = zipped.position(1)
    assert second.operands == (meta(3, 4),) * 3
    assert second.outputs == (meta(3, 4),)
    assert second.operand_names == ("self", "tensor1", "tensor2")


def test_an_empty_list_is_absent_at_every_position():
    op = aten._fused_sgd_.default
    names = [a.name for a in signature(op).args]
    values = dict.fromkeys(names) | {"self": (meta(2),), "grads": (meta(2),), "momentum_buffer_list": ()}
    part = Call(op, values, ()).position(0)
    assert part.operands[:3] == (meta(2), meta(2), None)


# -- arguments keyed by type -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read", [bool, int, float, lambda v: v + 1, lambda v: v < 0, lambda v: v == 1, lambda v: -v, lambda v: 2 * v]
)
def test_a_value_keyed_by_type_cannot_be_read(read):
    with pytest.raises(RuleError, match="Declare it: static="):
        read(ByType("alpha", float))


def test_stand_ins_compare_by_type():
    assert ByType("alpha", float) == ByType("alpha", float)
    assert ByType("alpha", float) != ByType("alpha", int)
    assert hash(ByType("alpha", int)) == hash(ByType("alpha", int))
    assert repr(ByType("alpha", float)) == "<alpha: float>"
    assert scalar_type(1.5) is float
