"""Torch's control flow on a mesh gives what it gives on one device: by public names, and by those of"""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from functorch.experimental.control_flow import map as of_functorch
from torch import cond as cond_by_name
from torch._higher_order_ops import associative_scan, foreach_map, scan, while_loop
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops.scan import scan as of_its_module

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.errors import LayoutError, NoRuleError, RankDisagreementError
from shardwise.testing import mesh as mesh_of

X = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
W = torch.linspace(-1, 1, 4, dtype=torch.float64).reshape(2, 2)


def chosen(x, w):
    return torch.cond(x.sum() > 3, lambda a: (a @ w).sin(), lambda a: a - 1, (x,))


def of_nothing(x, w):
    return torch.cond((x < 0).any(), lambda a: a @ w, lambda a: (a + 1) * 2, [x])


def nested(x, w):
    parts = torch.cond(
        x.max() > 3,
        lambda a, d: {"sum": a + 1, "too": d["w"] * 2},
        lambda a, d: {"sum": a - 1, "too": d["w"].sin()},
        operands=(x, {"w": w}),
    )
    return parts["sum"].sum() + parts["too"].sum()


def by_a_plain_predicate(x, w):
    return torch.cond(torch.tensor(False), lambda a: a.cos(), lambda a: a @ w, (x,))


def of_a_closure(x, w):
    return torch.cond(torch.tensor(True), lambda a: x @ (w * a), lambda a: x.sin() - a, (torch.ones(2).double(),))


def by_a_number(x, w):
    return torch.cond(x.shape[0] > 3, lambda a: a.cos(), lambda a: a @ w, (x,))


def counted(x, w):
    i, y = torch.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a @ w), (torch.tensor(0), x))
    return y * i


def by_an_integer(x, w):
    i, y = torch.while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a * 2), (0, x))
    return (y @ w) * i


def until_large(x, w):
    (d,) = torch.while_loop(lambda d: d["a"].sum() < 300, lambda d: ({"a": d["a"] * 2},), ({"a": x},))
    return d["a"] @ w


def without_a_turn(x, w):
    y, _ = torch.while_loop(lambda a, _: a.sum() < 0, lambda a, b: (a * 2, b * 2), (x, w))
    return y + 1


class Skipping(torch.nn.Module):
    """A layer that data may leave out: its weight has a gradient of zeros then, and AdamW decays it."""

    def __init__(self, w):
        super().__init__()
        self.inner = torch.nn.Linear(2, 2, bias=False, dtype=torch.float64)
        self.inner.weight = torch.nn.Parameter(w.detach().clone())

    def forward(self, x):
        return torch.cond((x < 0).any(), lambda a: self.inner(a) + 1, lambda a: a.sin(), (x,))


def skipped(x, w):
    model = Skipping(w)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for shift in (20, 0):
        optimizer.zero_grad()
        model(x - shift).square().sum().backward()
        optimizer.step()
    return model.inner.weight.detach()


class Choosing(torch.nn.Module):
    """A branch has hold of the whole module, and reads a part of it: the rest has no gradient, and AdamW skips it."""

    def __init__(self, w, **also):
        super().__init__()
        for name in ("first", "second", "neither", "shape", "detached"):
            self.register_parameter(name, torch.nn.Parameter(w.detach().clone()))
        self.by_a_number = also.get("by_a_number", False)

    def one(self, a, b):
        return a @ self.first + self.detached.detach().sum(0) + b.sum() * 0 + a.new_zeros(self.shape.shape[0])

    def other(self, a, b):
        scale = b.sum().item() if self.by_a_number else 2
        return torch.where(a > torch.arange(2), a, 0) @ self.second * scale

    def forward(self, x, w):
        return torch.cond(x.sum() > 3, self.one, self.other, (x, w))


def read_in_part(x, w, **also):
    model = Choosing(w, **also)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for shift in (0, 20, 0):
        optimizer.zero_grad()
        model(x - shift, w).square().sum().backward()
        optimizer.step()
    assert [name for name, p in model.named_parameters() if p.grad is None] == ["neither", "shape"]
    return torch.stack([p.detach() for p in model.parameters()]).requires_grad_(w.requires_grad)


def turn(carry, a):
    carry = carry * 0.5 + a
    return carry, carry.sin()


def scanned(x, w):
    carry, ys = scan(turn, w.new_zeros(2), x @ w)
    return ys + carry


def scanned_from_a_plain_start(x, w):
    carry, ys = of_its_module(turn, torch.zeros(2, dtype=torch.float64), x @ w, reverse=True)
    return ys * carry


def scanned_along_the_columns(x, w):
    """Some results have the scanned dim, and others have fewer dims than that."""
    start = {"row": x[:, 0] * 0, "turns": torch.zeros((), dtype=torch.float64)}

    def step(carry, slices):
        row = carry["row"] + slices["x"] * (slices["w"] @ w).sum()
        return {"row": row, "turns": carry["turns"] + 1}, [row.cos(), row.mean()]

    carry, (rows, means) = scan(step, start, {"x": x, "w": w}, dim=-1)
    return rows + means + carry["row"][:, None] * carry["turns"]


def scanned_in_a_closure(x, w):
    carry, ys = scan(lambda c, a: (c + a, (w * c).sum(0)), torch.zeros(2).double(), torch.ones(3, 2).double())
    return x @ w + ys.sum() + carry


def of_nothing_scanned(x, w):
    carry, ys = scan(turn, x @ w, [])
    return carry if ys == [] else None


def mapped_rows(x, w):
    return mapped(lambda a, b: (a @ b).tanh(), x, w) + of_functorch(lambda a, b: {"y": a @ b}, x, w)["y"]


def scanned_by_halves(x, w):
    return associative_scan(lambda a, b: a * b + a, x @ w, 0, combine_mode="generic")


def decayed(x, w):
    def both(one, other):
        return one[0] * other[0], other[0] * one[1] + other[1]

    return associative_scan(both, (x.cos(), x @ w), 0, reverse=True, combine_mode="generic")[1]


def chosen_by_another_name(x, w):
    return cond_by_name(x.sum() > 3, lambda a: (a @ w).sin(), lambda a: a - 1, (x,))


def counted_by_another_name(x, w):
    i, y = while_loop(lambda i, _: i < 3, lambda i, a: (i + 1, a @ w), (torch.tensor(0), x))
    return y * i


PROGRAMS = [
    scanned,
    scanned_from_a_plain_start,
    scanned_along_the_columns,
    scanned_in_a_closure,
    of_nothing_scanned,
    mapped_rows,
    scanned_by_halves,
    decayed,
    chosen_by_another_name,
    counted_by_another_name,
    chosen,
    of_nothing,
    nested,
    by_a_plain_predicate,
    of_a_closure,
    by_a_number,
    counted,
    by_an_integer,
    until_large,
    without_a_turn,
    skipped,
    read_in_part,
]
if torch.__version__ < "2.12":  # on one device its scans have gradients of half the values, or none
    PROGRAMS = [p for p in PROGRAMS if p not in (scanned, scanned_from_a_plain_start, scanned_along_the_columns)]
LOOPS = {counted, counted_by_another_name, by_an_integer, until_large, without_a_turn}
LAYOUTS = {"batch": (Shard(0), Replicate()), "columns": (Replicate(), Shard(1)), "rows": (Shard(1), Shard(0))}


def run(program, x, w):
    if program in LOOPS:  # torch differentiates them only in part
        with torch.no_grad():
            return [program(x, w)]
    w = w.clone().requires_grad_() if not isinstance(w, MeshTensor) else w.detach().requires_grad_()
    out = program(x, w)
    if out.requires_grad:
        out.square().sum().backward()
    return [out.detach(), w.grad]


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, MeshTensor) else tensor


def results(layout):
    m = mesh_of((dist.get_world_size(),))
    x, w = (sw.distribute_tensor(t, m, [place]) for t, place in zip((X, W), LAYOUTS[layout], strict=True))
    return [[whole(t) for t in run(program, x, w)] for program in PROGRAMS]


@cache
def on_one_device():
    return [run(program, X, W) for program in PROGRAMS]


@pytest.mark.filterwarnings("ignore")  # of dynamo, which runs torch's prototypes on one device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_control_flow_is_as_on_one_device(ranks, layout):
    for actual in ranks.run(results, layout):
        for one, other in zip(on_one_device(), actual, strict=True):
            torch.testing.assert_close(other, one)


def by_a_number_of_a_tensor():
    m = mesh_of((dist.get_world_size(),))
    x, w = sw.distribute_tensor(X, m, [Shard(0)]), sw.distribute_tensor(W, m, [Replicate()])
    model = Choosing(w, by_a_number=True)
    model(x, w).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    torch.testing.assert_close(whole(model.first.grad), X.sum(0)[:, None].expand(2, 2))
    assert not model.second.grad.count_nonzero()


def test_a_branch_that_asks_for_a_number_counts_as_reading_all_it_can_reach(ranks):
    ranks.run(by_a_number_of_a_tensor)


def refusals():
    m = mesh_of((dist.get_world_size(),))
    x = sw.distribute_tensor(X, m, [Shard(0)])
    with pytest.raises(RankDisagreementError):
        torch.cond(torch.tensor(dist.get_rank() == 0), torch.sin, torch.cos, (x,))
    with pytest.raises(RankDisagreementError):
        torch.cond(torch.tensor(dist.get_rank() == 1), lambda: x + 1, lambda: x - 1)
    with pytest.raises(LayoutError, match=r"has 8 elements.*mask\.any"):
        torch.cond(x > 3, torch.sin, torch.cos, (x,))
    with pytest.raises(Exception, match=r"run outside of graphs.*torch\.where"):
        torch.compile(lambda a: torch.cond(a.sum() > 3, torch.sin, torch.cos, (a,)), backend="eager", fullgraph=True)(x)
    with pytest.raises(LayoutError, match=r"slice of dim 0 of tensors of shapes.*do not have one length"):
        scan(turn, x[0], [x, x[:2]])
    with pytest.raises(LayoutError, match="there is no slice"):
        mapped(torch.sin, x[:0])
    with pytest.raises(NoRuleError, match=r"run foreach_map on MeshTensors.*loop over"):
        foreach_map(torch.add, [x], [x])
    with pytest.raises(Exception, match=r"run outside of graphs.*x\.unbind"):
        torch.compile(lambda a: scan(turn, a[0], a), backend="eager", fullgraph=True)(x)
    partial = MeshTensor.from_local(torch.ones((), dtype=torch.float64), m, [Partial()])
    assert torch.cond(partial > 1.5, lambda a: a + 1, lambda a: a - 1, (x,)).sum().item() == X.sum() + 8


def test_what_is_refused(ranks):
    ranks.run(refusals)


def in_pieces():
    x = sw.distribute_tensor(X, mesh_of((dist.get_world_size(),)), [Shard(0)])
    compiled = torch.compile(lambda a: chosen(a * 2, W_ON[0]) + 1, backend="aot_eager")
    W_ON[0] = sw.distribute_tensor(W, mesh_of((dist.get_world_size(),)), [Replicate()])
    return compiled(x).full_tensor()


W_ON = [W]


def test_a_compiled_program_is_broken_there(ranks):
    for actual in ranks.run(in_pieces):
        torch.testing.assert_close(actual, chosen(X * 2, W) + 1)


def scanned_in_pieces():
    m = mesh_of((dist.get_world_size(),))
    x, w = (sw.distribute_tensor(t, m, [place]) for t, place in ((X, Shard(0)), (W, Replicate())))
    compiled = torch.compile(lambda a, b: scanned(a * 2, b) + 1, backend="aot_eager")
    whole_graph = torch.compile(decayed, backend="aot_eager", fullgraph=True)
    by_kernel = associative_scan(torch.add, x, 0)  # the mode for elements, which on one device needs a card
    return [whole(t) for t in (compiled(x, w), whole_graph(x, w), by_kernel)]


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_program_is_broken_at_a_scan(ranks):
    expected = [scanned(X * 2, W) + 1, decayed(X, W), X.cumsum(0)]
    for actual in ranks.run(scanned_in_pieces):
        torch.testing.assert_close(actual, expected)


@pytest.mark.filterwarnings("ignore")
def test_plain_tensors_are_torchs():
    with pytest.raises(ValueError, match="CUDA"):
        associative_scan(torch.add, X, 0)
    torch.testing.assert_close(scan(turn, W[0], X)[1], scan(turn, init=W[0], xs=X, dim=0)[1])
    assert torch.cond.__doc__
    torch.testing.assert_close(torch.cond(X.sum() > 3, torch.sin, torch.cos, (X,)), X.sin())
    (y,) = torch.while_loop(lambda a: a.sum() < 300, lambda a: (a * 2,), (X,))
    torch.testing.assert_close(y, X * 16)
    compiled = torch.compile(
        lambda a: torch.cond(a.sum() > 3, torch.sin, torch.cos, (a,)), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(X), X.sin())
