"""``torch.cond`` and ``torch.while_loop`` on a mesh give what they give on one device."""

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.errors import LayoutError, RankDisagreementError
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


PROGRAMS = [
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
LOOPS = {counted, by_an_integer, until_large, without_a_turn}
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_control_flow_is_as_on_one_device(ranks, layout):
    expected = [run(program, X, W) for program in PROGRAMS]
    for actual in ranks.run(results, layout):
        for one, other in zip(expected, actual, strict=True):
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


def test_plain_tensors_are_torchs():
    assert torch.cond.__doc__
    torch.testing.assert_close(torch.cond(X.sum() > 3, torch.sin, torch.cos, (X,)), X.sin())
    (y,) = torch.while_loop(lambda a: a.sum() < 300, lambda a: (a * 2,), (X,))
    torch.testing.assert_close(y, X * 16)
    compiled = torch.compile(
        lambda a: torch.cond(a.sum() > 3, torch.sin, torch.cos, (a,)), fullgraph=True, backend="eager"
    )
    torch.testing.assert_close(compiled(X), X.sin())
