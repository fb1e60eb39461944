"""Samples from a schema: what an op takes is found, every kind of argument is filled in, and nothing else is made."""

# ruff: noqa: ARG005  # a fake and a backward take what the op takes

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.library import custom_op

from shardwise.errors import RuleError
from shardwise.testing import made, samples_from_schema
from shardwise.testing.samples import samples_of, without_complex
from shardwise.testing.schema_samples import accepts, lacks_fake

aten = torch.ops.aten


@custom_op("kit_schema::everything", mutates_args=())
def everything(
    xs: Sequence[Tensor],
    bias: Tensor | None,
    size: Sequence[int],
    times: int,
    mode: str,
    flag: bool,
    factors: Sequence[float],
    device: torch.device,
    *,
    dtype: torch.dtype,
    scale: float | None = None,
) -> Tensor:
    if mode not in ("mean", "sum") or times != 2 or len(factors) != 2:
        raise ValueError("not that")
    return sum(xs).reshape(list(size)).to(dtype, copy=True)


everything.register_fake(
    lambda xs, bias, size, times, mode, flag, factors, device, *, dtype, scale=None: xs[0].new_empty(size, dtype=dtype)
)


@custom_op("kit_schema::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate


gated.register_fake(lambda x, gate: torch.empty_like(x))


def shapes(samples):
    return [tuple(tuple(v.shape) for v in args if isinstance(v, Tensor)) for args, _ in samples]


def test_every_kind_of_argument_is_filled_in():
    samples = samples_from_schema(everything)
    assert len(samples) > 8
    assert all(accepts(torch.ops.kit_schema.everything.default, *sample, fake=False) for sample in samples)
    first, named = samples[0]
    assert [type(v) for v in first] == [list, Tensor, list, int, str, bool, list, torch.device]
    assert named == {"dtype": torch.float32}
    assert any(args[1] is None for args, _ in samples)
    assert any(args[4] == "sum" for args, _ in samples)
    assert any(args[5] is True for args, _ in samples)
    assert {kwargs.get("scale") for _, kwargs in samples} == {None, 0.5, 2.0}


def test_tensors_are_even_uneven_small_empty_and_without_dims():
    assert {(8, 6), (5, 7), (1, 2), (0, 3), (9,), ()} <= {a for a, *_ in shapes(samples_from_schema(gated))}


def test_what_an_op_happens_to_broadcast_is_kept_only_where_its_fake_agrees():
    guessed = shapes(samples_from_schema(gated))
    assert ((5, 7), (7,)) in guessed
    assert ((5,), (4, 5)) not in guessed  # the op takes it, and its fake says that the result is like x
    assert all(a == b for a, b in shapes(samples_from_schema(gated, one_shape=True)))


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (aten.mm.default, ((5, 7), (7, 4))),
        (aten.addmm.default, ((5, 7), (5, 4), (4, 7))),
        (aten.embedding.default, ((5, 7), (5, 7))),
    ],
    ids=str,
)
def test_patterns_of_named_sizes_are_found(op, wanted):
    samples = samples_from_schema(op)
    assert wanted in shapes(samples)
    assert all(accepts(op, *sample, fake=True) for sample in samples)


def test_shapes_may_be_given():
    assert shapes(samples_from_schema(gated, shapes=[((4, 3), (3,)), ((2,), (2,))]))[0] == ((4, 3), (3,))
    assert shapes(samples_from_schema(gated, shapes=[((4, 3), (7,))])) == []


def test_the_samples_are_the_same_every_time():
    one, other = samples_from_schema(gated), samples_from_schema(gated)
    assert all(torch.equal(a[0], b[0]) for (a, _), (b, _) in zip(one, other, strict=True))


def test_written_operands_are_not_touched_by_trying():
    (args, _), *_ = samples_from_schema(aten.relu_.default)
    assert torch.equal(args[0], made((8, 6)))


def test_an_op_that_takes_no_guess_has_no_sample():
    @custom_op("kit_schema::picky", mutates_args=())
    def picky(x: Tensor) -> Tensor:
        raise ValueError("never")

    assert samples_from_schema(picky) == []


def test_something_that_is_no_op_is_refused():
    with pytest.raises(RuleError, match="is not one op overload"):
        samples_from_schema(torch.relu)


def test_samples_are_given_as_lists_or_functions_by_any_name_of_the_op():
    calls = [((made((2,)), made((2,))), {})]
    op = torch.ops.kit_schema.gated.default
    assert samples_of(op, {gated: calls}) == samples_of(op, {op: lambda: calls}) == calls


def test_an_op_with_a_list_of_results_and_no_list_argument_gets_no_out():
    assert samples_of(aten.split_copy.Tensor_out, {}) == []


def test_an_op_that_cannot_tell_its_results_without_data_lacks_a_fake():
    library = torch.library.Library("kit_schema", "FRAGMENT")
    library.define("cpu_only(Tensor x) -> Tensor")
    library.impl("cpu_only", torch.clone, "CPU")
    op = torch.ops.kit_schema.cpu_only.default
    assert lacks_fake(op, samples_from_schema(op))
    torch.library.register_fake(op, torch.empty_like, lib=library)
    assert not lacks_fake(op, samples_from_schema(op))
    assert not lacks_fake(aten.nonzero.default, [((made((3,)),), {})])


def test_a_fake_that_says_that_data_decide_is_one():
    @custom_op("kit_schema::above", mutates_args=())
    def above(x: Tensor) -> Tensor:
        return x[x > 0].clone()

    op = torch.ops.kit_schema.above.default
    assert lacks_fake(op, [((made((3,)),), {})])
    above.register_fake(lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()))
    assert not lacks_fake(op, [((made((3,)),), {})])


@custom_op("kit_schema::turned", mutates_args=())
def turned(x: Tensor, by: float) -> Tensor:
    return x * by


@turned.register_fake
def _(x, by):
    return torch.empty_like(x)


def test_guessed_calls_have_complex_numbers_and_those_for_gradients_only_where_an_op_takes_nothing_else():
    def complex_ones(op, **options):
        return [args[0].is_complex() for args, _ in samples_of(op, {}, **options)]

    op = torch.ops.kit_schema.turned.default
    assert 0 < sum(complex_ones(op)) < len(complex_ones(op))
    assert not any(complex_ones(op, guess_complex=False))
    assert len(complex_ones(op, guess_complex=False)) == complex_ones(op).count(False)
    only = [((made((2,), torch.complex64),), {})]
    assert without_complex(only) is only
