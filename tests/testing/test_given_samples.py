"""Samples, meshes and numbers of cases that are wrong: the author is told which one and why."""

import pytest
import torch

from shardwise.errors import ArgumentError, RuleError
from shardwise.rule import rule
from shardwise.testing import check_rule, made

NEG = torch.ops.aten.neg.default
RULE = rule(NEG, "... -> ...", linear="self")
GOOD = ((made((8, 6)),), {})


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        (3, "its samples are an int, not a list"),
        ("abc", "its samples are a str"),
        ({NEG: lambda: None}, "its samples are None"),
        ({NEG: lambda: 1 / 0}, "the function of its samples raised ZeroDivisionError: division by zero"),
        ([GOOD, made((8, 6))], "sample 1 is a Tensor, not a pair of arguments and keyword arguments"),
        ([(GOOD[0],)], "sample 0 is a tuple, not a pair"),
        ([(made((8, 6)), {})], "sample 0 has a Tensor and a dict, not a tuple of arguments"),
        ([((made((8, 6)), made((8, 6))), {})], "sample 0 has 2 arguments, and the op takes 1: self"),
        ([(GOOD[0], {"nope": 1})], "sample 0 has the keyword argument 'nope', and the op takes self"),
        ([(GOOD[0], {"self": made((8, 6))})], "sample 0 has 'self' twice"),
        ([((3,), {})], "sample 0 has no tensor"),
        ([((torch.empty(8, 6, device="meta"),), {})], "sample 0 has a tensor of layout torch.strided on meta"),
        ([((made((8, 6)).to_sparse(),), {})], "a tensor of layout torch.sparse_coo on cpu"),
    ],
)
def test_what_is_no_sample_of_the_op_is_said(samples, found):
    with pytest.raises(RuleError, match=r"judge the rule of aten\.neg\.default by samples") as caught:
        check_rule(RULE, samples)
    assert found in caught.value.found


@pytest.mark.parametrize(
    "samples", [[GOOD], (GOOD,), lambda: [GOOD], iter([GOOD]), {NEG: [GOOD]}, [([made((8, 6))], {})]]
)
def test_a_list_a_function_and_an_iterator_are_taken(samples):
    assert check_rule(RULE, samples, cases=10).cases >= 5


def test_a_large_sample_is_warned_of():
    samples = [((torch.zeros(3 << 17),), {})]
    with pytest.warns(RuntimeWarning, match=r"sample 0 of aten\.neg\.default has 393,216 elements") as told:
        check_rule(RULE, samples, cases=1, meshes=[(2,)])
    assert told[0].filename == __file__


@pytest.mark.parametrize("meshes", [3, [3], [()], [(0,)], [(2, -1)], [("2",)], "2x2"])
def test_meshes_that_are_none(meshes):
    with pytest.raises(ArgumentError, match="its argument 'meshes' is"):
        check_rule(RULE, [GOOD], meshes=meshes)


@pytest.mark.parametrize("cases", [0, -1, 2.5, "10", True])
def test_numbers_of_cases_that_are_none(cases):
    with pytest.raises(ArgumentError, match="its argument 'cases' is"):
        check_rule(RULE, [GOOD], cases=cases)
