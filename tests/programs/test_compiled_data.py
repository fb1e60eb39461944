"""``x.data = y`` in compiled code, and what torch does not put into one graph, beside the same on plain tensors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.errors import LayoutError, ShardingError, TracingError
from shardwise.testing import mesh

WHOLE = torch.arange(6.0).reshape(3, 2)


def on(tensor, placement=Shard(0)):  # noqa: B008  # placements are values
    return sw.distribute_tensor(tensor.clone(), mesh((4,)), [placement])


def whole(value):
    return value.full_tensor().detach() if isinstance(value, sw.MeshTensor) else value


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", **options)


# -- x.data = y ------------------------------------------------------------------------------------------------------


def averaged(x, y):
    x.data = x.data * 0.9 + y.data * 0.1
    return (x * 2).sum()


def twice(x, y):
    x.data = y * 2
    x.data = x.data + 1
    return x * x


def of_a_new_tensor(x, y):
    new = x.detach() * 1
    new.data = y * 2
    return new + 1


def of_another_dtype(x, y):
    x.data = (y * 2).double()
    return x + 1


def of_another_shape(x, y):
    x.data = (y * 2)[:2]
    return x.sum()


def of_other_strides(x, y):
    x.data = (y * 2).t()
    return x.sum(0)


def without_grad(x, y):
    with torch.no_grad():
        x.data = y * 2
    return (x * x).sum()


def shared(x, y):
    x.data = y
    return x + y


ASSIGNMENTS = [
    averaged,
    twice,
    of_a_new_tensor,
    of_another_dtype,
    of_another_shape,
    of_other_strides,
    without_grad,
    shared,
]


def of_parameters(function):
    return function not in (of_a_new_tensor, of_another_dtype, of_another_shape, of_other_strides, shared)


def outcome(function, x, y):
    results = [function(x, y), function(x, y)]
    if x.requires_grad:
        results[-1].sum().backward()
    return *map(whole, (*results, x, y, x.grad)), x.dtype, x.stride()


def assigns(function, placement):
    def make(place):
        x, y = place(WHOLE), on(WHOLE + 5) if place is not torch.clone else WHOLE + 5
        return (nn.Parameter(x) if of_parameters(function) else x), y

    expected = outcome(function, *make(torch.clone))
    in_mesh = make(lambda t: on(t, placement))
    actual = outcome(compiled(function), *in_mesh)
    torch.testing.assert_close(actual[:5], expected[:5])
    assert actual[5:] == expected[5:]
    eager = make(lambda t: on(t, placement))
    outcome(function, *eager)
    assert in_mesh[0].placements == eager[0].placements
    x, y = make(lambda t: on(t, placement))
    if function not in (of_a_new_tensor, of_another_dtype):  # torch itself has no graph for these
        with pytest.raises(TracingError, match=r"x\.data\.copy_\(y\)"):
            compiled(function, fullgraph=True)(x, y)


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(Shard(0), id="sharded"),
        pytest.param(Replicate(), id="replicated", marks=[pytest.mark.slow, pytest.mark.sample]),
    ],
)
@pytest.mark.parametrize("function", ASSIGNMENTS, ids=lambda f: f.__name__)
def test_data_is_assigned_between_graphs(function, placement, pool):
    pool.run(assigns, function, placement)


def written_data():
    """What the error of one graph says to write."""

    def average(x, y):
        x.data.copy_(x.data * 0.9 + y * 0.1)
        return x + 1

    expected, actual = (WHOLE.clone(), WHOLE + 5), (on(WHOLE), on(WHOLE + 5))
    result = average(*expected)
    torch.testing.assert_close(whole(compiled(average, fullgraph=True)(*actual)), result)
    torch.testing.assert_close(whole(actual[0]), expected[0])


def test_data_is_written_in_one_graph(pool):
    pool.run(written_data)


def copies():
    x = on(WHOLE)
    copied = compiled(lambda t: copy.deepcopy(t) + 1)(x)
    torch.testing.assert_close(whole(copied), WHOLE + 1)
    leaf = compiled(lambda t: (t * 1).requires_grad_())(x)
    assert leaf.requires_grad
    torch.testing.assert_close(whole(leaf), WHOLE)


def test_copies_and_new_leaves_between_graphs(pool):
    pool.run(copies)


# -- what torch does not put into one graph --------------------------------------------------------------------------


LISTED = [1, 2, 3, 4]

# Each with what it gives where the graph may end; None where a program cannot have it on a mesh.
REFUSED_BY_TORCH = {
    "if x": (lambda x: x + 1 if x.sum() > 2 else x - 1, True),
    "complex(x)": (lambda x: complex(x.sum()), True),
    "a list at x": (lambda x: LISTED[x.sum().long() // 5], True),
    "tolist": (lambda x: x.tolist(), True),
    "torch.equal": (lambda x: torch.equal(x, x + 0), True),
    "torch.allclose": (lambda x: torch.allclose(x, x + 0), True),
    "repr": (lambda x: x + 1 if repr(x) else x, True),
    "set_": (lambda x: x.set_(x + 1), False),
    "storage": (lambda x: x.storage().size(), False),
    "untyped_storage": (lambda x: x.untyped_storage().nbytes(), False),
    "from_dlpack": (torch.from_dlpack, False),
}
IN_ONE_GRAPH = {
    "float(x)": lambda x: float(x.sum()),
    "torch.tensor of numbers": lambda x: torch.tensor([x.sum(), 1.0]),
    "torch.tensor": torch.tensor,
    "item": lambda x: x.sum().item(),
    "numpy": lambda x: torch.from_numpy(x.numpy() + 1),
    "nonzero": lambda x: x.nonzero().shape[0],
}


def same(function, options):
    torch.testing.assert_close(
        whole(compiled(function, **options)(on(WHOLE))), function(WHOLE.clone()), check_dtype=False
    )


def is_refused_as_by_torch(function, works):
    errors = []
    for tensor in (WHOLE.clone(), on(WHOLE)):
        with pytest.raises(Exception) as refused:  # noqa: PT011  # torch has several classes for this
            compiled(function, fullgraph=True)(tensor)
        errors.append(refused.value)
    plain, placed = errors
    assert type(placed) is type(plain) or isinstance(placed, ShardingError)
    if works:
        same(function, {})
    else:
        with pytest.raises(LayoutError):
            compiled(function)(on(WHOLE))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize(("function", "works"), REFUSED_BY_TORCH.values(), ids=REFUSED_BY_TORCH)
def test_one_graph_is_refused_where_torch_refuses_it_for_plain_tensors(function, works, pool):
    pool.run(is_refused_as_by_torch, function, works)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", IN_ONE_GRAPH.values(), ids=IN_ONE_GRAPH)
def test_one_graph_where_torch_makes_one_for_plain_tensors(function, pool):
    pool.run(same, function, {"fullgraph": True})


def distributed_within():
    """A tensor that a compiled function has made, without a gradient and with one."""
    device_mesh = mesh((4,))

    def place(x):
        return sw.distribute_tensor(x * 2, device_mesh, [Shard(0)], src_data_rank=None)

    torch.testing.assert_close(whole(compiled(place, fullgraph=True)(WHOLE.clone())), WHOLE * 2)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch puts no mesh of a closure into a graph")
def test_a_tensor_made_in_a_graph_is_distributed(pool):
    pool.run(distributed_within)
