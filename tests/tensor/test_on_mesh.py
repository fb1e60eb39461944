"""Tensors that a program makes for itself, in the forward pass of a placed module or under ``sw.on``."""

from __future__ import annotations

import copy
import gc
import io
import math
import os
import pickle
import threading
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.tensor import on_mesh
from shardwise.testing import mesh

WORDS, WIDTH, LENGTH = 16, 8, 6


def on(full, *layout):
    return sw.distribute_tensor(full, mesh((2,)), layout)


def equal(found, wanted, **tolerance):
    whole = found.full_tensor() if isinstance(found, MeshTensor) else found
    torch.testing.assert_close(whole, wanted, **tolerance)


# -- models --------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Makes positions, frequencies and a mask for itself; a table is a plain attribute."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(WIDTH, 3 * WIDTH)
        self.table = 1 / 100 ** (torch.arange(0, WIDTH, 2).double() / WIDTH)

    def forward(self, x):
        length = x.shape[1]
        angles = torch.outer(torch.arange(length).double(), self.table)
        turn = torch.cat([angles.sin(), angles.cos()], -1)
        q, k, v = (self.proj(x) * torch.cat([turn, turn, turn], -1)).split(WIDTH, -1)
        mask = torch.full((length, length), -math.inf, dtype=x.dtype).triu(1)
        return ((q @ k.transpose(1, 2)) / WIDTH**0.5 + mask).softmax(-1) @ v


class Depth(nn.Module):
    """Leaves out samples at random, as stochastic depth does."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        kept = (torch.rand(x.shape[0], 1, 1) + 0.7).floor()
        return x + self.inner(x) * kept / 0.7


class Model(nn.Module):
    def __init__(self, recompute, recurrent):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.block = Depth(Attention())
        self.recurrent = recurrent(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)
        self.recompute = recompute

    def forward(self, ids):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        x, _ = self.recurrent(x)
        return self.out(x)


def trains(recompute, recurrent):
    torch.manual_seed(3)
    whole = Model(recompute, getattr(nn, recurrent)).double()
    model = sw.distribute_module(
        copy.deepcopy(whole), mesh((2,)), {"out.weight": [Shard(0)], "words.weight": [Shard(1)]}
    )
    ids, classes = torch.randint(0, WORDS, (4, LENGTH)), torch.randint(0, WORDS, (4, LENGTH))
    runs = [(whole, ids, classes), (model, on(ids, Shard(0)), on(classes, Shard(0)))]
    losses = []
    for net, data, target in runs:
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(data).flatten(0, 1), target.flatten())
            loss.backward()
            optimizer.step()
        losses.append(loss)
    equal(losses[1], losses[0])
    for wanted, found in zip(whole.parameters(), model.parameters(), strict=True):
        equal(found, wanted, rtol=1e-6, atol=1e-9)
    assert type(torch.zeros(1)) is torch.Tensor
    again = copy.deepcopy(model).eval()
    equal(again(on(ids, Shard(0))).float(), model.eval()(on(ids, Shard(0))).full_tensor().float())
    saved = pickle.dumps(sw.distribute_module(nn.Sequential(nn.LSTM(2, 3)), mesh((2,))))
    assert pickle.loads(saved)(on(torch.ones(2, 2), Replicate()))[0].shape == (2, 3)


@pytest.mark.parametrize(("recompute", "recurrent"), [(False, "LSTM"), (True, "GRU"), (False, "RNN")])
def test_a_model_that_makes_tensors_trains_as_on_one_device(two_ranks, recompute, recurrent):
    two_ranks.run(trains, recompute, recurrent)


class Failing(nn.Module):
    def forward(self, _):
        raise ValueError("as asked")


def leaves_after_an_error():
    model = sw.distribute_module(nn.Sequential(Failing()), mesh((2,)))
    with pytest.raises(ValueError, match="as asked"):
        model(on(torch.ones(2), Replicate()))
    assert type(torch.zeros(1)) is torch.Tensor


def test_an_error_in_a_forward_leaves_nothing_behind(two_ranks):
    two_ranks.run(leaves_after_an_error)


class Interrupted(nn.Module):
    """Makes a tensor; each submodule counts the interruptions that are left."""

    def __init__(self, left):
        super().__init__()
        self.recurrent = nn.RNN(2, 2)
        self.left = left

    def forward(self, x):
        made = torch.ones(2)
        if self.left:
            self.left -= 1
            with sw.on(None):
                raise KeyboardInterrupt
        return self.recurrent((x + made)[None])[0] + made


def leaves_after_an_interruption():
    m = mesh((2,))
    inner = Interrupted(3)
    model = sw.distribute_module(nn.Sequential(nn.Sequential(inner)), m)
    x = on(torch.ones(1, 2), Replicate())
    for called in (model, inner):
        with pytest.raises(KeyboardInterrupt):
            called(x)
        assert type(torch.zeros(1)) is torch.Tensor
        with sw.on(m):
            assert type(torch.zeros(1)) is MeshTensor
        assert type(torch.zeros(1)) is torch.Tensor
    with pytest.raises(KeyboardInterrupt):
        model(x)
    with sw.on(m):
        seen = model(x)
        assert type(torch.zeros(1)) is MeshTensor
    assert type(torch.zeros(1)) is torch.Tensor
    equal(seen, model(x).full_tensor())
    assert not on_mesh._entered.modes
    assert not on_mesh._entered.passes


def test_an_interruption_in_a_forward_leaves_nothing_behind(two_ranks):
    two_ranks.run(leaves_after_an_interruption)


class Notes(nn.Module):
    """Keeps a weak reference to what it calculates on the way."""

    def forward(self, x):
        inner = x * 2
        self.inner = weakref.ref(inner)
        return inner + torch.ones(2)


def frees_at_once():
    model = sw.distribute_module(nn.Sequential(Notes()), mesh((2,)))
    x = on(torch.ones(2), Replicate())
    model(x)
    gc.collect()
    gc.disable()
    try:
        result = model(x)
        assert model[0].inner() is None
        seen = weakref.ref(result)
        del result
        assert seen() is None
    finally:
        gc.enable()


def test_a_forward_leaves_no_reference_cycle(two_ranks):
    """What it calculated is freed at once, not when Python's collector comes: memory would grow by half."""
    two_ranks.run(frees_at_once)


def runs_in_threads():
    """One forward ends while another is under way in a second thread."""
    started, ended = threading.Event(), threading.Event()
    kinds = {}

    class Waits(nn.Module):
        def forward(self, x, waits):
            if waits:
                started.set()
                assert ended.wait(60)
            return x + torch.ones(2)

    model = sw.distribute_module(Waits(), mesh((2,)))
    x = on(torch.ones(2), Replicate())

    def other():
        kinds["sum"] = type(model(x, True)).__name__
        kinds["made"] = type(torch.ones(1)).__name__

    thread = threading.Thread(target=other)
    thread.start()
    assert started.wait(60)
    assert type(model(x, False)) is MeshTensor
    assert type(torch.ones(1)) is torch.Tensor
    ended.set()
    thread.join()
    assert kinds == {"sum": "MeshTensor", "made": "Tensor"}


def test_forwards_in_two_threads(two_ranks):
    two_ranks.run(runs_in_threads)


# -- what is made --------------------------------------------------------------------------------------------------

MADE = {
    "zeros": lambda: torch.zeros(2, 3),
    "ones": lambda: torch.ones(2, 3, dtype=torch.int32),
    "full": lambda: torch.full((2,), 3.5),
    "arange": lambda: torch.arange(1, 9, 2),
    "linspace": lambda: torch.linspace(0, 1, 5),
    "eye": lambda: torch.eye(3),
    "tril_indices": lambda: torch.tril_indices(3, 3),
    "without dims": lambda: torch.zeros(()),
    "of numbers by C++": lambda: torch.hann_window(8),
    "rand": lambda: torch.rand(3, 2),
    "randn": lambda: torch.randn(3, dtype=torch.float64),
    "randint": lambda: torch.randint(5, (4,)),
    "randint from": lambda: torch.randint(2, 5, (4,)),
    "randperm": lambda: torch.randperm(6),
    "normal": lambda: torch.normal(2.0, 0.5, (4,)),
    "uniform_": lambda: torch.empty(4).uniform_(1, 2),
}


def makes(name):
    torch.manual_seed(7)
    wanted = MADE[name]()
    torch.manual_seed(7)
    with sw.on(mesh((2,))), sw.random.using("torch"):
        made = MADE[name]()
    assert type(made) is MeshTensor
    assert made.placements == (Replicate(),)
    assert torch.equal(made.to_local(), wanted)
    with sw.on(mesh((2,))), sw.random.using("counter"):
        return MADE[name]().to_local()


@pytest.mark.parametrize("name", MADE)
def test_what_torch_makes_from_numbers_lies_on_the_mesh(two_ranks, name):
    """With the values of one device; or, drawn by shardwise's generator, those of any other rank."""
    first, second = two_ranks.run(makes, name)
    assert torch.equal(first, second)


def stays_plain():
    first = torch.zeros(3)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with sw.on(mesh((2,))):
        plain = [torch.tensor([1.0, 2.0]), torch.zeros(2, device="meta"), torch.rand(2, generator=generator), first + 1]
        with sw.on(None):
            plain.append(torch.zeros(2))
            with sw.on(mesh((2,))):
                assert type(torch.zeros(2)) is MeshTensor
        part = on(torch.arange(8.0), Shard(0)).to_local()
        assert type(part) is torch.Tensor
        objects = [None, None]
        dist.all_gather_object(objects, dist.get_rank())  # torch's own code, which makes tensors for it
        assert objects == [0, 1]
    plain.append(torch.zeros(2))
    assert {type(t) for t in plain} == {torch.Tensor}


def test_data_parts_and_what_lies_elsewhere_stay_plain(two_ranks):
    two_ranks.run(stays_plain)


def memory_is_copied():
    """Torch copies memory by an empty tensor that it gives the memory: the copy is plain where the tensor is."""
    m = mesh((2,))
    plain, file = torch.arange(6.0).view(2, 3), io.BytesIO()
    placed = on(plain + 1, Shard(0))
    model = sw.distribute_module(nn.BatchNorm1d(4), m)
    torch.save({"plain": plain, "part": placed.to_local(), "placed": placed}, file)
    with sw.on(m):
        copies = [copy.deepcopy(plain), pickle.loads(pickle.dumps(plain)), plain.clone().share_memory_()]
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        again, view = copy.deepcopy([loaded["placed"], loaded["placed"][:, 1:]])
        other = copy.deepcopy(model)
        assert plain.untyped_storage().clone().tolist() == plain.untyped_storage().tolist()
        points = torch.quasirandom.SobolEngine(2, scramble=True, seed=3).draw(4)
    for copied in [*copies, loaded["plain"]]:
        assert type(copied) is torch.Tensor
        assert torch.equal(copied, plain)
    assert type(loaded["part"]) is torch.Tensor
    for restored in (loaded["placed"], again, pickle.loads(pickle.dumps(placed))):
        assert restored.placements == (Shard(0),)
        equal(restored, plain + 1)
    view.zero_()
    equal(again, torch.tensor([[1.0, 0, 0], [4, 0, 0]]))
    equal(other.running_var, torch.ones(4))
    equal(points, torch.quasirandom.SobolEngine(2, scramble=True, seed=3).draw(4))


def test_memory_that_torch_copies_or_reads_stays_as_it_is(two_ranks):
    two_ranks.run(memory_is_copied)


def lazy():
    """Its parameters are plain until they have a shape, and so when they have one; they are placed as any."""
    m, x = mesh((2,)), torch.randn(4, 6)
    torch.manual_seed(5)
    whole = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    wanted = whole(x)
    torch.manual_seed(5)
    with sw.on(m):
        model = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
        equal(model(on(x, Shard(0))), wanted)
    sw.distribute_module(model, m, {"0.weight": [Shard(0)]})
    equal(model(on(x, Shard(0))), whole(x))
    equal(model[1].running_var, whole[1].running_var)


def test_lazy_modules_get_their_shapes(two_ranks):
    two_ranks.run(lazy)


def forked():
    """The workers of a DataLoader are forked: their datasets make rows and augment them, each as it is asked."""
    with sw.on(mesh((2,))):
        child = os.fork()
        if not child:
            with sw.on(None):
                pass
            made = torch.full((3,), 1.0) + torch.rand(3)
            os._exit(0 if type(made) is torch.Tensor else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert type(torch.zeros(2)) is MeshTensor


def test_in_a_forked_process_tensors_stay_plain(two_ranks):
    two_ranks.run(forked)


def derived():
    """What is made of a tensor that the ranks have compared needs no comparison."""
    x, table = on(torch.ones(4, 3), Shard(0)), torch.arange(12.0).view(4, 3)
    sums, twice = 1 + table[1:3].sum(0) * 2 + torch.zeros(4, 3), 1 + table * 2
    with sw.on(mesh((2,))):
        x + table
        before = sw.engine.plain_tensors.different_summaries
        sw.engine.plain_tensors.different_summaries = None  # an error for whoever compares
        try:
            equal(x + table[1:3].sum(0) * 2, sums)
            table.mul_(2)
            equal(x + table, twice)
        finally:
            sw.engine.plain_tensors.different_summaries = before


def test_what_is_made_of_compared_tensors_is_not_compared(two_ranks):
    two_ranks.run(derived)


# -- compiled ------------------------------------------------------------------------------------------------------


def compiled_inside(backend):
    """A compiled submodule in a forward that is not compiled: its graph makes local tensors, which stay so."""
    torch._dynamo.reset()
    torch.manual_seed(3)
    whole = Attention().double()
    outer = nn.Sequential(copy.deepcopy(whole))
    outer[0].compile(backend=backend, fullgraph=True)
    model = sw.distribute_module(nn.Sequential(outer), mesh((2,)))
    x = torch.randn(4, LENGTH, WIDTH, dtype=torch.float64)
    for _ in range(2):
        equal(model(on(x, Shard(0))), whole(x))
    torch._dynamo.reset()
    everything = torch.compile(sw.distribute_module(copy.deepcopy(whole), mesh((2,))), backend=backend, fullgraph=True)
    equal(everything(on(x, Shard(0))), whole(x))


def entered_in_compiled_code():
    def shifted(x):
        with sw.on(x.device_mesh):
            return x + torch.arange(8.0)

    compiled = torch.compile(shifted, backend="aot_eager", fullgraph=True)
    equal(compiled(on(torch.ones(8), Shard(0))), 1 + torch.arange(8.0))


def test_entered_in_compiled_code_it_does_nothing(two_ranks):
    two_ranks.run(entered_in_compiled_code)


def test_compiled_modules_in_a_forward_and_around_it(two_ranks):
    two_ranks.run(compiled_inside, "aot_eager")


def made_by_autograds_thread():
    """A backward pass on a card runs in another thread, where torch has the modes of the one that called it."""
    grid = mesh((2,))
    made = {}

    def run(mode, name):
        try:
            made[name] = mode.run(torch.ops.aten.reshape.default, (), (torch.ones(4), [2, 2]), {}).shape
        except Exception as error:  # noqa: BLE001  # an assertion in a thread is lost
            made[name] = error

    with sw.on(grid):
        outer = torch.utils._python_dispatch._get_current_dispatch_mode()
        with sw.on(grid):
            inner = torch.utils._python_dispatch._get_current_dispatch_mode()
            for name, mode in (("inner", inner), ("outer", outer)):
                thread = threading.Thread(target=run, args=(mode, name))
                thread.start()
                thread.join()
    assert made == {"inner": (2, 2), "outer": (2, 2)}


def test_a_backward_pass_in_a_thread_of_autograds(two_ranks):
    two_ranks.run(made_by_autograds_thread)
