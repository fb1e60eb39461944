"""What a rule's ``work`` returns: a number of operations, or an error that names the rule."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.errors import RuleError
from shardwise.kernel.signature import Call
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.rule import rule
from shardwise.steps.costs import stated_work

RELU = torch.ops.aten.relu.default
META = TensorMeta.contiguous((4, 4), torch.float32)
CALL = Call(RELU, {"self": META}, (META,))


def stated(work):
    return stated_work(rule(RELU, "... -> ...", work=work), CALL)


@pytest.mark.parametrize("operations", [0, 3, 2.5])
def test_a_number_of_operations_is_taken(operations):
    assert stated(lambda _: operations) == operations


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda _: -5, "returned -5"),
        (lambda _: math.nan, "returned nan"),
        (lambda _: math.inf, "returned inf"),
        (lambda _: "many", "returned a str"),
        (lambda _: True, "returned True"),
        (lambda _: None, "returned None"),
        (lambda _: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_anything_else_is_refused(work, said):
    with pytest.raises(RuleError, match=f"its work= {said}"):
        stated(work)
