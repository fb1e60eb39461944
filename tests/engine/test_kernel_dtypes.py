"""What torch's kernels refuse is refused on every rank, and before anything is communicated."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.engine import kernel_dtypes
from shardwise.testing import mesh
from shardwise.tools.rehearse import rehearse

INTEGERS = torch.arange(24).reshape(4, 6)
REFUSED = [
    ("softmax", INTEGERS, {"dim": 1}),
    ("log_softmax", INTEGERS, {"dim": 1}),
    ("var", INTEGERS, {"dim": 1}),
    ("std", INTEGERS, {"dim": 1}),
    ("mean", INTEGERS, {"dim": 1}),
    ("logcumsumexp", INTEGERS, {"dim": 1}),
    ("argmax", INTEGERS > 3, {"dim": 1}),
    ("argmin", INTEGERS > 3, {"dim": 1}),
    ("cummax", INTEGERS.to(torch.complex64), {"dim": 1}),
    ("amax", INTEGERS.to(torch.complex64), {"dim": 1}),
    ("topk", INTEGERS.to(torch.complex64), {"k": 2, "dim": 1}),
    ("cosine_similarity", INTEGERS, {"dim": 1}),
    ("median", INTEGERS > 3, {"dim": 1}),
    ("cumsum", INTEGERS.float(), {"dim": 1, "dtype": torch.bool}),
    ("cumsum", INTEGERS > 3, {"dim": 1, "dtype": torch.bool}),
    ("cumprod", INTEGERS, {"dim": 1, "dtype": torch.bool}),
]
TAKEN = [
    ("sum", INTEGERS, {"dim": 1}),
    ("amax", INTEGERS, {"dim": 1}),
    ("argmax", INTEGERS, {"dim": 1}),
    ("cumsum", INTEGERS > 3, {"dim": 1}),
    ("logsumexp", INTEGERS, {"dim": 1}),
    ("logsumexp", INTEGERS.to(torch.complex128) / 10, {"dim": 1}),
    ("prod", INTEGERS, {"dim": 1}),
    ("any", INTEGERS, {"dim": 1}),
    ("var", INTEGERS.to(torch.complex128), {"dim": 1}),
    ("topk", INTEGERS, {"k": 2, "dim": 1}),
    ("bytes", torch.arange(96, dtype=torch.uint8).reshape(4, 24), {"dtype": torch.int32}),
]


def call(name, tensor, options):
    if name == "bytes":
        return tensor.view(**options)
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    return function(tensor, tensor, **options) if name == "cosine_similarity" else function(tensor, **options)


REFUSALS = (RuntimeError, NotImplementedError, TypeError)


def refuses_as_torch_does(name, tensor, options, layout):
    with pytest.raises(REFUSALS) as expected:
        call(name, tensor, options)
    placed = sw.distribute_tensor(tensor, mesh((4,)), layout)
    # From torch 2.14 on kernels raise other types than the functions that tell shapes.
    with pytest.raises(expected.type if torch.__version__ < "2.14" else REFUSALS):
        call(name, placed, options)
    # The ranks are still in step.
    assert placed.sum().item() == tensor.sum().item()


@pytest.mark.parametrize("layout", [[Replicate()], [Shard(0)], [Shard(1)]])
@pytest.mark.parametrize(("name", "tensor", "options"), REFUSED)
def test_what_a_kernel_refuses_is_refused(pool, name, tensor, options, layout):
    pool.run(refuses_as_torch_does, name, tensor, options, layout)


def computes_as_torch_does(name, tensor, options, layout):
    expected = call(name, tensor, options)
    result = call(name, sw.distribute_tensor(tensor, mesh((4,)), layout), options)
    expected, result = (t if isinstance(t, torch.Tensor) else t.values for t in (expected, result))
    torch.testing.assert_close(result.full_tensor(), expected)


@pytest.mark.parametrize("layout", [[Replicate()], [Shard(0)], [Shard(1)]])
@pytest.mark.parametrize(("name", "tensor", "options"), TAKEN)
def test_what_a_kernel_takes_is_computed(pool, name, tensor, options, layout):
    pool.run(computes_as_torch_does, name, tensor, options, layout)


def asks_for_empty_operands_apart():
    m = mesh((4,))
    rows = {n: sw.distribute_tensor(torch.ones(3, 1, n, dtype=torch.bool), m, [Replicate()]) for n in (0, 1)}
    with pytest.raises(NotImplementedError, match="not implemented for 'Bool'"):
        torch.bmm(rows[1], rows[1].mT)
    assert not torch.bmm(rows[0], rows[0].mT).any()


def test_a_kernel_is_asked_apart_for_operands_without_elements(pool):
    empty = torch.ones(3, 1, 0, dtype=torch.bool)
    assert not torch.bmm(empty, empty.mT).any()  # it has nothing to do
    pool.run(asks_for_empty_operands_apart)


WHOLE_NUMBERS, HALVES = torch.arange(6).view(2, 3), torch.arange(6.0).view(2, 3).half()
NUMBERS = {  # calls with a number that the kernel refuses, and numbers that it takes
    "fill_": (lambda x, n: x.clone().fill_(n), WHOLE_NUMBERS, float("inf"), (-1, 2.5, True)),
    "fill_ halves": (lambda x, n: x.clone().fill_(n), HALVES, 1j, (2.5, 3, 1 + 0j)),
    "masked_fill": (lambda x, n: x.masked_fill(x > 2, n), WHOLE_NUMBERS, float("inf"), (-1, 2.5)),
    "masked_fill halves": (lambda x, n: x.masked_fill(x > 2, n), HALVES, 1e30, (-1, 2.5)),
    "index_fill": (lambda x, n: x.index_fill(0, torch.tensor([1]), n), WHOLE_NUMBERS, float("nan"), (-1, 2.5)),
    "clamp_": (lambda x, n: x.clone().clamp_(max=n), WHOLE_NUMBERS.to(torch.uint8), 1 << 40, (3, 4)),
    "add_ in place": (lambda x, n: x.clone().add_(1, alpha=n), WHOLE_NUMBERS, 2.5, (2,)),
    "sub_ of halves": (lambda x, n: x.clone().sub_(x, alpha=n), HALVES, 1 << 20, (0, 2)),
    "threshold": (lambda x, n: torch.threshold(x, 0, n), WHOLE_NUMBERS.to(torch.uint8), 300, (0, 2)),
    "full_like": (torch.full_like, WHOLE_NUMBERS, float("inf"), (-1, 2.5)),
}


def refuses_a_number(name):
    call, tensor, refused, taken = NUMBERS[name]
    x = sw.distribute_tensor(tensor, mesh((4,)), [Replicate()])
    for number in (refused, *taken, refused, *taken):
        try:
            expected = call(tensor, number)
        except RuntimeError as error:
            with pytest.raises(type(error)):
                call(x, number)
        else:
            torch.testing.assert_close(call(x, number).full_tensor(), expected)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_a_kernel_refuses_says_nothing_of_others(pool, name):
    pool.run(refuses_a_number, name)


def refuses_integers_without_elements(layout):
    x = sw.distribute_tensor(torch.ones(2, 0, dtype=torch.int64), mesh((4,)), layout)
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        x.softmax(0)
    assert x.sum().item() == 0


@pytest.mark.parametrize("layout", [[Replicate()], [Shard(0)], [Shard(1)]])
def test_a_lowering_gets_no_dtype_that_its_kernel_refuses(pool, layout):
    """Not even without elements: one device returns nothing, and a rank would reduce what it has not."""
    pool.run(refuses_integers_without_elements, layout)


ROWS = torch.linspace(-1, 1, 32).view(8, 4)
PER_CHANNEL = torch.ones(4)
SEVERAL = {
    "rows by 32 bits": lambda put: torch.index_copy(put(ROWS), 0, put(torch.arange(8).int()), put(ROWS)),
    "classes of 32 bits": lambda put: torch.nn.functional.nll_loss(put(ROWS), put(torch.arange(8).int() % 4)),
    "a weight of float64": lambda put: torch.nn.functional.batch_norm(
        put(ROWS), None, None, put(PER_CHANNEL.double()), put(PER_CHANNEL), training=True
    ),
    "integers in a batch": lambda put: torch.nn.functional.batch_norm(
        put(ROWS.long()), put(PER_CHANNEL), put(PER_CHANNEL), training=False
    ),
}


def refuses_several(name, layout):
    m = mesh((4,))
    with pytest.raises(REFUSALS):
        SEVERAL[name](lambda t: t)
    with pytest.raises(REFUSALS):
        SEVERAL[name](lambda t: sw.distribute_tensor(t, m, layout if t.ndim > 1 else [Replicate()]))
    assert sw.distribute_tensor(ROWS, m, layout).sum().item() == pytest.approx(ROWS.sum().item(), abs=1e-5)


@pytest.mark.parametrize("layout", [[Shard(0)], [Shard(1)]])
@pytest.mark.parametrize("name", SEVERAL)
def test_operands_of_several_dtypes_are_refused_as_on_one_device(pool, name, layout):
    pool.run(refuses_several, name, layout)


def saves_in_the_dtype_of_one_device(layout):
    batch, statistics = ROWS.bfloat16(), [torch.zeros(4), torch.ones(4)]
    expected = torch.ops.aten.native_batch_norm.default(batch, None, None, *statistics, True, 0.1, 1e-5)
    parts = [
        sw.distribute_tensor(t, mesh((4,)), p) for t, p in ((batch, layout), *((s, [Replicate()]) for s in statistics))
    ]
    found = torch.ops.aten.native_batch_norm.default(parts[0], None, None, *parts[1:], True, 0.1, 1e-5)
    for ours, one in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), one, rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("layout", [[Shard(0)], [Shard(1)]])
def test_saved_statistics_have_the_dtype_of_one_device(pool, layout):
    pool.run(saves_in_the_dtype_of_one_device, layout)


WRITES = {
    "a number": lambda x: x.add_(1),
    "itself": lambda x: x.mul_(x),
    "a function": torch.Tensor.exp_,
    "chance": torch.Tensor.uniform_,
    "along a dim": lambda x: x.cumsum_(0),
    "out=": lambda x: torch.add(x, 1, out=x),
    "a list": lambda x: torch._foreach_add_([x], 1),
    "rows": lambda x: x.index_add_(0, torch.zeros_like(x[:, 0], dtype=torch.int64), torch.ones_like(x)),
}


def refuses_shared_places(name, shape, layout):
    expanded = torch.ones(shape).expand(3, 2)
    message = "more than one element"
    with pytest.raises(RuntimeError, match=message):
        WRITES[name](expanded)
    x = sw.distribute_tensor(torch.ones(shape), mesh((4,)), layout).expand(3, 2)
    with pytest.raises(RuntimeError, match=message):
        WRITES[name](x)
    assert x.sum().item() == 6


@pytest.mark.parametrize(("shape", "layout"), [((1, 2), [Shard(1)]), ((1, 2), [Replicate()]), ((3, 1), [Shard(0)])])
@pytest.mark.parametrize("name", WRITES)
def test_a_write_to_shared_places_is_refused_on_every_rank(pool, name, shape, layout):
    pool.run(refuses_shared_places, name, shape, layout)


def takes_shared_places(layout):
    base = torch.ones(1, 2)
    x, expected = sw.distribute_tensor(base, mesh((4,)), layout).expand(3, 2), base.expand(3, 2)
    for t in (x, expected):
        t.fill_(3.0)
    torch.testing.assert_close(x.full_tensor(), expected)


@pytest.mark.parametrize("layout", [[Replicate()], [Shard(1)]])
def test_a_kernel_that_takes_shared_places_writes_them(pool, layout):
    pool.run(takes_shared_places, layout)


def asked_on_a_card(monkeypatch, calls):
    """The ops whose kernels would be asked on a mesh of cards."""
    asked = []

    def raised(op, device_type, values, instead, shared=()):
        asked.append((op, device_type))

    monkeypatch.setattr(kernel_dtypes, "_raised", raised)
    monkeypatch.setattr(kernel_dtypes, "has_cuda", lambda: True)
    monkeypatch.setattr(kernel_dtypes, "_known", {})

    def program(mesh):
        x, one, mask = torch.rand(1, 4), torch.zeros(1, dtype=torch.long), torch.ones(1, 4, dtype=torch.bool)
        x, one, mask = (sw.distribute_tensor(t, mesh, [Replicate()], src_data_rank=None) for t in (x, one, mask))
        calls(x, one, mask)

    rehearse(program, (4,), device="cuda")
    assert {device for _, device in asked} <= {"cuda"}
    return [op for op, _ in asked]


def test_no_kernel_of_a_card_gets_made_up_places(monkeypatch):
    """There an index out of range fails an assertion, after which the process can do nothing more."""
    functional = torch.nn.functional

    def calls(x, one, mask):
        x.gather(0, one[:, None])
        x.index_select(0, one)
        x.index_add(0, one, x)
        x.scatter(0, one[:, None], 1.0)
        x[one]
        x[0].quantile(0.5)
        x.masked_scatter(mask, x[:, :2])
        functional.nll_loss(x, one)
        functional.embedding(one, x)
        one.softmax(0, dtype=torch.float32)
        one.cumsum(0)

    ops = asked_on_a_card(monkeypatch, calls)
    assert torch.ops.aten.cumsum.default in ops
    places = ("index", "indices", "mask", "target")
    assert not [op for op in ops for arg in op._schema.arguments if any(place in arg.name for place in places)]


OPERATORS = {
    "shifted": lambda x, _: (x > 3) << 1,
    "shifted back": lambda x, _: (x > 3) >> 1,
    "by bools": lambda x, _: x << (x > 3),
    "by one bool": lambda x, _: x << (x > 3).any(),
    "any of bytes": lambda x, place: torch.any(x.to(torch.uint8), 1, out=place(torch.zeros(4, dtype=torch.bool))),
    "all of bytes": lambda x, place: torch.all(x.to(torch.uint8), out=place(torch.tensor(False))),
}


def operators_compute_as_torch_does(name, layout):
    def place(tensor):
        return sw.distribute_tensor(tensor, mesh((4,)))

    expected = OPERATORS[name](INTEGERS, torch.clone)
    result = OPERATORS[name](sw.distribute_tensor(INTEGERS, mesh((4,)), layout), place).full_tensor()
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("layout", [[Replicate()], [Shard(0)], [Shard(1)]])
@pytest.mark.parametrize("name", OPERATORS)
def test_what_the_meta_device_refuses_and_a_kernel_takes_is_computed(pool, name, layout):
    pool.run(operators_compute_as_torch_does, name, layout)


def by_an_imaginary_number(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        expected = INTEGERS * 1j
        result = sw.distribute_tensor(INTEGERS, mesh((4,)), [Shard(0)]) * 1j
        torch.testing.assert_close(result.full_tensor(), expected)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_complex_number_has_a_dtype_whatever_the_default_is(pool, dtype):
    pool.run(by_an_imaginary_number, dtype)
