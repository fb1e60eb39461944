"""``x.data = y``, copies, and each way to the memory of a tensor: it is right, or it raises and says what to call.

The ways run on worker processes: one that ends the interpreter is a failed test, not the end of the run.
"""

from __future__ import annotations

import copy
import io
import pickle
from types import FunctionType

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters

import shardwise as sw
from shardwise import MeshTensor, Partial, Replicate, Shard
from shardwise.errors import LayoutError, PlainTensorError, RankDisagreementError
from shardwise.testing import mesh


def whole(*shape):
    return torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)


def on(tensor, placement, **kwargs):
    return sw.distribute_tensor(tensor, mesh((torch.distributed.get_world_size(),)), [placement], **kwargs)


def parameter():
    return nn.Parameter(on(whole(4, 4), Shard(0)))


def equal(tensor, expected):
    with torch.no_grad():
        torch.testing.assert_close(tensor.full_tensor(), expected, rtol=0, atol=0)


# -- each way to the memory --------------------------------------------------------------------------------------


def _plain():
    return torch.zeros(4, 4)


def _set_plain_data(x):
    _plain().data = x


def _set_parameter_data(x):
    nn.Parameter(_plain()).data = x


def _queue(x):
    queue = mp.SimpleQueue()
    queue.put(x)
    return queue.get()


def _loaded(x):
    buffer = io.BytesIO()
    torch.save(x, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()))


def _swapped(x):
    other = on(_plain(), Replicate())
    torch.utils.swap_tensors(x, other)
    equal(x, _plain())
    return other


def _is_plain_range(value, _):
    assert type(value) is torch.Tensor
    assert torch.equal(value, torch.arange(16.0).view(4, 4))


def _is_x(value, x):
    assert type(value) is MeshTensor
    assert value.placements == x.placements
    equal(value, whole(4, 4))


def _shares(value, x):
    _is_x(value, x)
    assert value.is_shared()
    assert value.to_local().is_shared()


def _saved_by_numpy(x):
    buffer = io.BytesIO()
    np.save(buffer, x)
    return np.load(io.BytesIO(buffer.getvalue()))


def _is_whole(value, x):
    assert type(value) is np.ndarray
    assert value.dtype == np.float32
    assert value.tolist() == whole(4, 4).tolist()
    equal(x, whole(4, 4))


def _is_read_only(value, x):
    _is_whole(value, x)
    with pytest.raises(ValueError, match="read-only"):
        value[0] = 0


def _is_written_apart(value, x):
    _is_whole(value, x)
    value[0] = 0
    equal(x, whole(4, 4))


def _equals(expected):
    def check(value, x):
        assert value == expected

    return check


def _launched(x):
    """As where Triton launches a kernel: code that it makes asks, and a module of its own called that."""

    def made(x):
        return x.data_ptr()

    def run(x, bound):
        return bound(x)

    in_triton = FunctionType(run.__code__, {"__name__": "triton.runtime.jit"})
    return in_triton(x, FunctionType(made.__code__, {}))


def _graphed(x):
    """As ``torch.cuda.make_graphed_callables`` asks, which copies an operand where its address is another."""
    return FunctionType((lambda x: x.data_ptr()).__code__, {"__name__": "torch.cuda.graphs"})(x)


class _Picture(torch.Tensor):
    """A tensor with a meaning, as ``tv_tensors.Image`` of torchvision."""


WAYS = {
    # What reads the memory of a tensor as a whole.
    "np.from_dlpack": (np.from_dlpack, LayoutError),
    "torch.from_dlpack": (torch.from_dlpack, LayoutError),
    "torch.to_dlpack": (torch.to_dlpack, LayoutError),
    "torch.utils.dlpack.to_dlpack": (torch.utils.dlpack.to_dlpack, LayoutError),
    "__dlpack__": (lambda x: x.__dlpack__(), LayoutError),
    "__dlpack_c_exchange_api__": (lambda x: type(x).__dlpack_c_exchange_api__, _equals(None)),
    # NumPy's arrays are copies of the whole, and those that torch would share may not be written.
    "__array__": (lambda x: x.__array__(), _is_read_only),
    "np.asarray": (np.asarray, _is_read_only),
    "np.array": (np.array, _is_written_apart),
    "np.add": (lambda x: np.add(x, 0), lambda value, _: torch.testing.assert_close(value, whole(4, 4))),
    "np.save": (_saved_by_numpy, _is_written_apart),
    "numpy": (lambda x: x.numpy(), _is_read_only),
    "numpy of a replicated tensor": (lambda x: x.redistribute(placements=[Replicate()]).numpy(), _is_read_only),
    "numpy(force=True)": (lambda x: x.numpy(force=True), _is_written_apart),
    "numpy of a parameter": (lambda x: nn.Parameter(x).numpy(), RuntimeError),
    "numpy(force=True) of a parameter": (lambda x: nn.Parameter(x).numpy(force=True), _is_written_apart),
    "memoryview": (memoryview, TypeError),
    "torch.frombuffer": (lambda x: torch.frombuffer(x, dtype=torch.float32), ValueError),
    "np.frombuffer": (np.frombuffer, TypeError),
    "__cuda_array_interface__": (lambda x: x.__cuda_array_interface__, AttributeError),
    "hasattr __cuda_array_interface__": (lambda x: hasattr(x, "__cuda_array_interface__"), _equals(False)),
    # Torch's own sign for a tensor without memory of its own.
    "data_ptr": (lambda x: x.data_ptr(), _equals(0)),
    "const_data_ptr": (lambda x: getattr(x, "const_data_ptr", x.data_ptr)(), _equals(0)),  # from torch 2.13 on
    "data_ptr of a Triton kernel's launch": (_launched, LayoutError),
    "data_ptr of a graphed callable": (_graphed, lambda value, x: _equals(x.to_local().data_ptr())(value, x)),
    "storage_offset": (lambda x: x.storage_offset(), _equals(0)),
    "nbytes": (lambda x: x.nbytes, _equals(64)),
    # Storages.
    "untyped_storage": (lambda x: x.untyped_storage(), LayoutError),
    "storage": (lambda x: x.storage(), LayoutError),
    "_typed_storage": (lambda x: x._typed_storage(), LayoutError),
    "untyped_storage().share_memory_": (lambda x: x.untyped_storage().share_memory_(), LayoutError),
    "untyped_storage().copy_": (lambda x: x.untyped_storage().copy_(_plain().untyped_storage()), LayoutError),
    "untyped_storage().byteswap": (lambda x: x.untyped_storage().byteswap(torch.float32), LayoutError),
    "untyped_storage().tolist": (lambda x: x.untyped_storage().tolist(), LayoutError),
    "untyped_storage().resize_": (lambda x: x.untyped_storage().resize_(400), LayoutError),
    "pickle of a storage": (lambda x: pickle.dumps(x.untyped_storage()), LayoutError),
    "torch.save of a storage": (lambda x: torch.save(x.untyped_storage(), io.BytesIO()), LayoutError),
    "queue of a storage": (lambda x: _queue(x.untyped_storage()), LayoutError),
    "plain.set_ of a storage": (lambda x: _plain().set_(x.untyped_storage()), LayoutError),
    "plain.set_": (lambda x: _plain().set_(x), LayoutError),
    "set_": (lambda x: x.clone().set_(x), _is_x),
    "set_ by name": (lambda x: x.clone().set_(source=x), _is_x),
    "set_ of itself": (lambda x: x.set_(x), _is_x),
    "set_ of another dtype": (lambda x: x.set_(x.double()), LayoutError),
    "set_ with sizes": (lambda x: x.set_(x.clone(), 0, (2, 2), (2, 1)), LayoutError),
    "set_ of nothing": (lambda x: x.set_(), LayoutError),
    "set_ of a parameter": (lambda x: nn.Parameter(x).set_(x), LayoutError),
    "the op set_": (lambda x: torch.ops.aten.set_.source_Tensor(x, x.clone()), LayoutError),
    "set_ of a plain tensor": (lambda x: x.set_(_plain()), LayoutError),
    "set_ of a storage": (lambda x: x.set_(_plain().untyped_storage()), LayoutError),
    "is_set_to of a plain tensor": (lambda x: x.is_set_to(_plain()), _equals(False)),
    "plain.is_set_to": (lambda x: _plain().is_set_to(x), _equals(False)),
    "is_set_to after set_": (lambda x: x.clone().set_(x).is_set_to(x), _equals(True)),
    "is_set_to of a number": (lambda x: x.is_set_to(3), TypeError),
    "is_set_to of None": (lambda x: x.is_set_to(None), TypeError),
    "is_set_to": (
        lambda x: [x.is_set_to(x), x.is_set_to(x.clone()), x.is_set_to(x.t())],
        _equals([True, False, False]),
    ),
    # .data
    "plain.data": (_set_plain_data, LayoutError),
    "plain parameter.data": (_set_parameter_data, LayoutError),
    "data": (lambda x: x.data, _is_x),
    # Elements by Python functions.
    "apply_": (lambda x: x.apply_(abs), LayoutError),
    "map_": (lambda x: x.map_(x, max), LayoutError),
    "map2_": (lambda x: x.map2_(x, x, max), LayoutError),
    "plain.map_": (lambda x: _plain().map_(x, max), RuntimeError),
    # Sizes.
    "resize_ to the same": (lambda x: x.resize_(4, 4), _is_x),
    "resize_as_": (lambda x: x.resize_as_(x), _is_x),
    "plain.resize_as_": (lambda x: torch.arange(16.0).resize_as_(x), _is_plain_range),
    # Memory that other processes, devices and streams see: that of this rank's part.
    "share_memory_": (lambda x: x.share_memory_(), _shares),
    "is_shared": (lambda x: x.is_shared(), _equals(False)),
    "is_pinned": (lambda x: x.is_pinned(), _equals(False)),
    # Whole objects.
    "queue": (_queue, _is_x),
    "pickle": (lambda x: pickle.loads(pickle.dumps(x)), _is_x),
    "torch.save": (_loaded, _is_x),
    "copy.copy": (copy.copy, _is_x),
    "copy.deepcopy": (copy.deepcopy, _is_x),
    "torch.utils.swap_tensors": (_swapped, lambda value, _: equal(value, whole(4, 4))),
    "as_subclass": (lambda x: x.as_subclass(torch.Tensor), _is_x),
    "as_subclass of its own class": (lambda x: x.as_subclass(type(x)), _is_x),
    "as_subclass of another class": (lambda x: x.as_subclass(_Picture), LayoutError),
    "as_subclass of no class": (lambda x: x.as_subclass(3), TypeError),
    "torch.asarray": (torch.asarray, _is_x),
    "torch.as_tensor": (torch.as_tensor, _is_x),
    "torch.tensor": (lambda x: x.new_tensor(x), _is_x),
}


def goes(way):
    access, outcome = WAYS[way]
    x = on(whole(4, 4), Shard(0))
    if not isinstance(outcome, type):
        return outcome(access(x), x)
    with pytest.raises(outcome) as caught:
        access(x)
    if outcome in (LayoutError, PlainTensorError):
        assert (
            "to_local()" in str(caught.value) or "x.data = y" in str(caught.value) or "from_local" in str(caught.value)
        )
    return None


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_the_memory_is_right_or_says_what_to_call(two_ranks, way):
    two_ranks.run(goes, way)


def shared_module():
    module = nn.Linear(4, 4)
    sw.distribute_module(module, mesh((2,)), {"weight": [Shard(0)]})
    module.share_memory()
    assert all(p.is_shared() and p.to_local().is_shared() for p in module.parameters())


def test_a_module_shares_its_parts(two_ranks):
    two_ranks.run(shared_module)


# -- x.data = y --------------------------------------------------------------------------------------------------


def takes_over():
    x, y = on(whole(4, 4), Shard(0)), on(whole(2, 6).double(), Replicate())
    alias = x.detach()
    x.data = y
    assert (x.shape, x.dtype, x.placements) == ((2, 6), torch.float64, (Replicate(),))
    equal(x, whole(2, 6).double())
    equal(alias, whole(4, 4))
    y.zero_()  # the memory is that of y
    equal(x, torch.zeros(2, 6).double())
    assert x.to_local().data_ptr() == y.to_local().data_ptr()
    x.data = x.data.float()
    assert x.dtype == torch.float32
    with pytest.raises(TypeError):
        x.data = 1
    equal(x, torch.zeros(2, 6))
    p = parameter()
    with pytest.raises(RuntimeError, match="requires gradients"):
        p.data = on(torch.ones(4, 4).int(), Shard(0))
    equal(p, whole(4, 4))


def test_data_takes_over_memory_layout_and_dtype(two_ranks):
    two_ranks.run(takes_over)


def takes_plain_values():
    p = parameter()  # Shard(0)
    p.data = whole(4, 4) * 3
    assert (p.placements, p.requires_grad) == ((Shard(0),), True)
    equal(p, whole(4, 4) * 3)
    (p * 2).sum().backward()
    assert p.grad.placements == (Shard(0),)
    p.grad = None
    p.data = whole(5, 3).t().double()  # another shape, dtype and order of memory
    assert (p.shape, p.dtype, p.placements) == ((3, 5), torch.float64, (Shard(0),))
    equal(p, whole(5, 3).t().double())
    p.data = torch.ones(1, 1).expand(4, 4)
    equal(p, torch.ones(4, 4))
    p.data = torch.tensor(2.0)  # no dim to shard
    assert p.placements == (Replicate(),)
    equal(p, torch.tensor(2.0))
    x = on(whole(4, 4), Replicate())
    value = whole(4, 4) * 2
    x.data = value
    value.zero_()  # one memory, as in torch, where every rank has the whole
    equal(x, torch.zeros(4, 4))
    pending = MeshTensor.from_local(whole(4, 4), mesh((2,)), [Partial("sum")])
    pending.data = whole(4, 4)
    equal(pending, whole(4, 4))


def test_data_takes_a_plain_tensor_as_whole(two_ranks):
    two_ranks.run(takes_plain_values)


def refuses_what_may_be_a_part():
    rank = torch.distributed.get_rank()
    x = on(whole(4, 4), Shard(0))
    with pytest.raises(RankDisagreementError, match=r"set \.data of f32\[4,4\]"):
        x.data = torch.full((4, 4), float(rank))
    with pytest.raises(RankDisagreementError):
        x.data = whole(4, 4)[2 * rank : 2 * rank + 2].clone()
    with pytest.raises(PlainTensorError, match="from_local"):
        x.data = torch.ones(2, 4)
    uneven = on(whole(3, 4), Shard(0))
    with pytest.raises(PlainTensorError, match="from_local"):
        uneven.data = torch.ones(1, 4)  # the shape of the other rank's part
    with sw.plain("refuse"), pytest.raises(PlainTensorError, match="distribute_tensor"):
        x.data = whole(4, 4)
    with pytest.raises(PlainTensorError):
        x.data = torch.eye(4).to_sparse()
    equal(x, whole(4, 4))


def test_data_refuses_what_may_be_one_ranks_part(two_ranks):
    two_ranks.run(refuses_what_may_be_a_part)


def gradients_follow():
    p, x = parameter(), on(whole(4, 4), Replicate())
    (p * x).sum().backward()
    assert p.grad.placements == (Shard(0),)
    p.grad = None
    p.data = on(whole(4, 4) * 2, Shard(1))
    (p * x).sum().backward()
    assert p.grad.placements == (Shard(1),)
    equal(p.grad, whole(4, 4))
    optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.5)
    optimizer.step()
    equal(p, whole(4, 4))
    p.data = on(whole(4, 4) * 3, Shard(0))  # another layout than gradient and momentum
    optimizer.step()
    equal(p, whole(4, 4) * 3 - whole(4, 4) * 1.5)
    with torch.no_grad():
        p.grad = None
        p.t_()  # makes it another view of its memory, in another layout
    assert p.placements == (Shard(1),)
    (p * x).sum().backward()
    assert p.grad.placements == (Shard(1),)
    p.data = p.data.double()
    p.grad = None
    (p * x.double()).sum().backward()
    assert p.grad.dtype == torch.float64


def test_gradients_and_optimizers_follow_new_data(two_ranks):
    two_ranks.run(gradients_follow)


def under_a_mode():
    x, y = on(whole(4, 4), Shard(0)), on(whole(4, 6), Shard(1))
    with torch.device("cpu"):  # sees the functions that a program calls
        x.data = y
        equal(x.data, whole(4, 6))
        x.t_()
    equal(x, whole(4, 6).t())


def test_data_under_a_mode_that_sees_functions(two_ranks):
    two_ranks.run(under_a_mode)


def while_it_arrives():
    p, y = parameter(), on(whole(4, 4) * 2, Shard(0))
    p.data = y.redistribute(placements=[Replicate()], async_op=True)
    equal(p, whole(4, 4) * 2)
    late = on(whole(4, 4), Shard(0)).redistribute(placements=[Replicate()], async_op=True)
    late.data = y
    equal(late, whole(4, 4) * 2)


def test_data_of_tensors_under_way(two_ranks):
    two_ranks.run(while_it_arrives)


def _vector(module):
    vector_to_parameters(parameters_to_vector(module.parameters()) * 2, module.parameters())


def _average(module):
    average = copy.deepcopy(module)
    with torch.no_grad():
        for kept, new in zip(average.parameters(), module.parameters(), strict=True):
            new.data = new.data * 3
            kept.data.lerp_(new.data, 0.25)
            kept.data = kept.data * 0.5 + new.data * 0.5
    module.load_state_dict(average.state_dict())


def _pruned(module):
    prune.l1_unstructured(module, "weight", amount=5)
    prune.remove(module, "weight")


def _pruned_rows(module):
    prune.ln_structured(module, "weight", amount=1, n=2, dim=0)


def _weight_norm(module):
    parametrizations.weight_norm(module)
    nn.utils.parametrize.remove_parametrizations(module, "weight")


def _orthogonal(module):
    parametrizations.orthogonal(module, orthogonal_map="householder", use_trivialization=False)


def _initialised(module):
    nn.init.constant_(module.weight, 0.5)
    nn.init.eye_(module.weight)
    module.weight.data.mul_(2)
    module.bias.data.fill_(3)
    module.bias.data = torch.full_like(module.bias.data, 4)


def _converted(module):
    module.double()
    module.float()


def _swa(module):
    average = torch.optim.swa_utils.AveragedModel(module)
    for p in module.parameters():
        p.data += 1
    average.update_parameters(module)
    average.update_parameters(module)
    module.load_state_dict(average.module.state_dict())


def _flat(module):
    flat = torch.cat([p.data.flatten() for p in module.parameters()])
    at = 0
    for p in module.parameters():
        p.data = flat[at : at + p.numel()].view(p.shape)
        at += p.numel()
    flat.mul_(2)


def _clipped(module):
    for p in module.parameters():
        p.data = p.data.clamp(-0.1, 0.1)


PROGRAMS = {
    f.__name__[1:]: f
    for f in (
        _vector,
        _average,
        _pruned,
        _pruned_rows,
        _weight_norm,
        _orthogonal,
        _initialised,
        _converted,
        _swa,
        _flat,
        _clipped,
    )
}


def runs_as_on_one_device(name):
    torch.manual_seed(0)
    expected = nn.Linear(4, 4)
    module = copy.deepcopy(expected)
    sw.distribute_module(module, mesh((2,)), {"weight": [Shard(0)]})
    PROGRAMS[name](expected)
    PROGRAMS[name](module)
    x = whole(2, 4)
    for m, batch in ((expected, x), (module, on(x, Replicate()))):
        optimizer = torch.optim.Adam(m.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            m(batch).square().sum().backward()
            optimizer.step()
    for (key, p), q in zip(expected.state_dict().items(), module.state_dict().values(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_assign_data_give_what_one_device_gives(two_ranks, name):
    two_ranks.run(runs_as_on_one_device, name)


# -- copies ------------------------------------------------------------------------------------------------------


def a_copy():
    """A view that had to be gathered: it shares nothing with its base."""
    view = on(whole(6, 4), Shard(0)).select(0, 1)
    assert view.spec.is_copy
    return view


def copies_of_copies():
    view, leaf = a_copy(), a_copy().detach().requires_grad_()
    for same, of in (
        (copy.copy(view), view),
        (view.redistribute(placements=view.placements), view),
        (view.redistribute(placements=view.placements, grad_placements=[Replicate()]), view),
        (view.data, view),
        (view.detach(), view),
        (leaf.redistribute(placements=leaf.placements, grad_placements=[Replicate()]).detach(), leaf),
    ):
        assert same.to_local().data_ptr() == of.to_local().data_ptr()
        same.zero_()
        equal(of, torch.zeros(4))
    for own in (copy.deepcopy(a_copy()), pickle.loads(pickle.dumps(a_copy())), a_copy().clone()):
        own.zero_()
        equal(own, torch.zeros(4))


def test_a_copy_of_its_base_stays_one_where_memory_is_shared(two_ranks):
    two_ranks.run(copies_of_copies)


def copied():
    for of in (whole(4, 4), on(whole(4, 4), Shard(0))):
        p = nn.Parameter(of)
        p.sum().backward()
        assert copy.deepcopy(p).grad is None
        twin = copy.deepcopy(nn.Linear(4, 4, bias=False).requires_grad_(False)).weight
        assert twin.grad is None
        leaf = p.detach().requires_grad_()
        leaf.sum().backward()
        twin = copy.deepcopy(leaf)
        assert twin.grad is not None
        twin.sum().backward()
        expected = torch.full((4, 4), 2.0)
        assert torch.equal(twin.grad.full_tensor() if isinstance(of, MeshTensor) else twin.grad, expected)
        once = copy.deepcopy(p)
        once.sum().backward()
        assert torch.equal(once.grad.full_tensor() if isinstance(of, MeshTensor) else once.grad, torch.ones(4, 4))


def test_a_parameters_copy_starts_without_a_gradient(two_ranks):
    two_ranks.run(copied)


def strides_and_sharing():
    for make in (lambda t: t, lambda t: on(t, Shard(1))):
        x = make(whole(4, 6))
        for view in (x.t(), x[:, ::2], x[:1].expand(3, 6), x[1:3]):
            twin = copy.deepcopy(view)
            assert twin.stride() == view.stride()
            dense = copy.deepcopy(nn.Parameter(view))
            assert dense.stride() == nn.Parameter(view).data.clone().stride()
            if isinstance(view, MeshTensor):
                equal(twin, view.full_tensor())
                equal(dense, view.full_tensor())
                equal(dense.reshape(-1), view.full_tensor().reshape(-1))
        base, view = copy.deepcopy([x, x.t()])
        view.zero_()
        assert not base.any()


def copies_of_moved_views():
    """A row of a tensor that is cut into rows had to move, and so had the third of its elements."""
    for names in ("xvw", "wvx", "vxw", "vw", "w"):
        results = []
        for place in (lambda t: t, lambda t: on(t, Shard(0))):
            x = place(whole(6, 4))
            of = {"x": x, "v": x[1], "w": x[1].view(2, 2)}
            twins = dict(zip(names, copy.deepcopy([of[name] for name in names]), strict=True))
            for number, name in enumerate(names):
                twins[name].mul_(number + 2)
                twins[name][1].fill_(-1.0 - number)
            results.append([*of.values(), *twins.values()])
        for expected, found in zip(*results, strict=True):
            equal(found, expected)


def test_deep_copies_of_moved_views_follow_that_of_their_base(two_ranks):
    two_ranks.run(copies_of_moved_views)


def test_deep_copies_keep_strides_and_shared_memory(two_ranks):
    two_ranks.run(strides_and_sharing)
