"""Labels of dims, and what stands for rows of several reductions."""

import pytest
import torch

from shardwise.errors import NotationError
from shardwise.kernel.signature import Call, signature
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.rule import ANY, UNMOVED, dim_of, each, einop, labels, replaced, whole

aten = torch.ops.aten


def meta(*shape):
    return TensorMeta.contiguous(shape, torch.float32)


def call(op, *values, outputs):
    names = [a.name for a in signature(op).args]
    return Call(op, dict.fromkeys(names) | dict(zip(names, values, strict=False)), outputs)


def test_labels_name_dims_and_leave_out_those_that_must_be_whole():
    assert labels(3) == ("d0", "d1", "d2")
    assert labels(3, {-1}) == ("d0", "d1", None)
    assert labels(2, [0], "b") == (None, "b1")
    assert labels(0, [0]) == ()


def test_a_label_is_replaced_by_any_number_of_others():
    assert replaced(labels(3), 1) == ("d0", "d2")
    assert replaced(labels(2), 1, "p", None) == ("d0", "p", None)


def test_a_dim_is_counted_from_the_front():
    assert (dim_of(-1, 3), dim_of(1, 3), dim_of(-1, 0)) == (2, 1, 0)


def test_rows_stand_for_several_reductions():
    assert each(UNMOVED, "R, k -> k") == ("R, avg -> avg", "R, max -> max", "R, min -> min")
    assert ANY == ("* -> *, ...",)


def test_whole_has_one_row():
    bound = call(aten.add.Tensor, meta(4), meta(4), outputs=(meta(4),))
    assert [str(row) for row in whole(bound).bind(bound).rows] == ["R: [R, R] -> [R]"]


@pytest.mark.parametrize("shape", [(4,), (4, 2), (4, 2, 3)])
def test_any_number_of_trailing_dims_may_be_whole(shape):
    bound = call(aten.clone.default, meta(*shape), outputs=(meta(*shape),))
    rows = einop("n _* -> n _*")(bound).bind(bound).rows
    assert [str(row) for row in rows] == ["shard n: [S(0)] -> [S(0)]", "R: [R] -> [R]"]


@pytest.mark.parametrize(
    ("text", "reason"), [("_* n -> n", "not the last"), ("... _* -> ...", "nothing says which dims are whole")]
)
def test_trailing_dims_that_nothing_counts_are_refused(text, reason):
    with pytest.raises(NotationError, match=reason):
        einop(text)
