"""Flex attention against one device, on gloo ranks: layouts, score functions, masks, captured tensors."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm import events
from shardwise.errors import NoStrategyError, RankDisagreementError
from shardwise.testing import mesh
from shardwise_matmul import flex_kernels

BLOCK = 16


def slow_sample():
    """For what only .ci/run's sample and the slow run take."""
    return [pytest.mark.slow, pytest.mark.sample]


BATCH, HEADS, LENGTH, WIDTH = 4, 8, 128, 4
CLOSE = {"rtol": 1e-5, "atol": 1e-5}

slopes = torch.logspace(0, -3, HEADS)
documents = torch.arange(LENGTH).div(40, rounding_mode="floor").expand(BATCH, LENGTH) + torch.arange(BATCH)[:, None] % 2


def causal(_b, _h, i, j):
    return i >= j


def window(_b, _h, i, j):
    return (i - j).abs() <= 20


def by_head_and_batch(b, h, i, j):
    return (i + 7 * h >= j) & ((i + j + b) % 3 > 0)


def same_document(ids):
    return lambda b, _h, i, j: (ids[b, i] == ids[b, j]) & (i >= j)


def alibi(slopes):
    return lambda score, _b, h, i, j: score - slopes[h] * (i - j).abs()


def by_index(score, b, h, i, j):
    return score * (1 + 0.1 * b) + 0.01 * h * (i - 2 * j)


def capped(score, *_):  # dynamo imports the module of a global that it sees: none here, so that pytest can run these
    return 5 * (score / 5).tanh()


# By name: the score function, the mask's function, and the mask's numbers of batch elements and heads (None: one).
FUNCTIONS = {
    "plain": (None, None, None, None),
    "causal": (None, causal, None, None),
    "window, capped": (capped, window, None, None),
    "by index": (by_index, by_head_and_batch, BATCH, HEADS),
    "alibi": (alibi(slopes), causal, None, None),
    "documents": (by_index, same_document(documents), BATCH, None),
}


def operands(key_heads=HEADS, length=LENGTH, batch=BATCH, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    shapes = (batch, HEADS, length, WIDTH), (batch, key_heads, length, WIDTH), (batch, key_heads, length, WIDTH)
    return [torch.randn(shape, generator=g).to(dtype).requires_grad_() for shape in shapes]


def masked(function, batch, heads, length=LENGTH):
    return function and create_block_mask(function, batch, heads, length, length, device="cpu", BLOCK_SIZE=BLOCK)


def accept_any(*_):
    """For code that is compiled, which knows no mock."""


def compare(m, whole, placements, attend, close=None):
    """Run on one device and on the mesh; compare results and gradients. Returns what was sent in the forward pass."""
    parts = [sw.distribute_tensor(t.detach(), m, p).requires_grad_() for t, p in zip(whole, placements, strict=True)]
    sent = []
    # Torch has a backward for CPU, and refuses it: no kernel of its compiler has one.
    with mock.patch("torch.nn.attention.flex_attention._validate_device", new=accept_any):
        expected = attend(*whole)
        with events.observe(sent.append):
            found = attend(*parts)
    close = CLOSE if close is None else close
    weight = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected.dtype)
    (expected * weight).sum().backward()
    (found * sw.distribute_tensor(weight, m, [Replicate()] * m.ndim)).sum().backward()
    torch.testing.assert_close(found.full_tensor(), expected, **close)
    for part, t in zip(parts, whole, strict=True):
        torch.testing.assert_close(part.grad.full_tensor(), t.grad, **close)
    return found.placements, sent


LAYOUTS = {
    "batch": [Shard(0)],
    "heads": [Shard(1)],
    "both": [Shard(0), Shard(1)],
    "batch twice": [Shard(0), Shard(0)],
}


def mesh_for(placements):
    n = dist.get_world_size()
    return mesh((n,), ("tp",)) if len(placements) == 1 else mesh((2, n // 2), ("dp", "tp"))


def local_where_sharded(name, layout):
    score, mask, batch, heads = FUNCTIONS[name]
    block_mask = masked(mask, batch, heads)
    placements = LAYOUTS[layout]
    m = mesh_for(placements)
    # The ranks compare plain tensors that are captured, once.
    with sw.plain("replicate"):
        found, sent = compare(
            m,
            operands(),
            [placements] * 3,
            lambda q, k, v: flex_attention(q, k, v, score_mod=score, block_mask=block_mask),
        )
    assert found == tuple(placements)
    assert sent == []


# Torch compiles each score function once more, about a second: every day one or two of a kind.
SOME = [pytest.param(name, marks=[] if name == "by index" else slow_sample()) for name in FUNCTIONS]


@pytest.mark.parametrize("layout", ["batch", pytest.param("heads", marks=slow_sample())])
@pytest.mark.parametrize("name", SOME)
def test_batch_and_heads_stay_where_they_are(ranks, name, layout):
    ranks.run(local_where_sharded, name, layout)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("layout", ["both", "batch twice"])
def test_on_two_mesh_dims(pool, layout):
    pool.run(local_where_sharded, "by index", layout)


# -- the sequence ----------------------------------------------------------------------------------------------------


def sharded_queries(name, length, stays):
    score, mask, batch, heads = FUNCTIONS[name]
    block_mask = masked(mask, batch, heads, length)
    m = mesh_for([Shard(2)])
    with sw.plain("replicate"):
        found, sent = compare(
            m,
            operands(length=length),
            [[Shard(2)], [Replicate()], [Replicate()]],
            lambda q, k, v: flex_attention(q, k, v, score_mod=score, block_mask=block_mask),
        )
    assert (found == (Shard(2),), sent == []) == (stays, stays)


@pytest.mark.parametrize(
    ("name", "length", "stays"),
    [
        pytest.param(*case, marks=[] if case == ("by index", LENGTH, True) else slow_sample())
        for case in [*[(name, LENGTH, True) for name in FUNCTIONS], ("plain", 101, True), ("causal", 101, False)]
    ],
)
def test_queries_stay_sharded_in_whole_blocks_of_the_mask(ranks, name, length, stays):
    ranks.run(sharded_queries, name, length, stays)


def dense(numbers, indices):
    """Which blocks a sparse matrix of blocks has."""
    counted = torch.arange(indices.shape[-1]) < numbers[..., None]
    return torch.zeros(indices.shape).scatter_add(-1, indices.long(), counted.float())


def parts_of_a_mask(placements):
    """Kernels read the block mask: that of a rank is the one that torch makes for the rank's queries."""
    m = mesh_for(placements)
    block_mask = masked(by_head_and_batch, BATCH, HEADS)
    parts = [
        sw.distribute_tensor(t.detach(), m, [Replicate()] if i and placements == [Shard(2)] else placements)
        for i, t in enumerate(operands())
    ]
    taken, kernel = [], flex_kernels.FORWARD

    def take(*args):
        taken.append(args)
        return kernel(*args)

    with sw.plain("replicate"), mock.patch.object(flex_kernels, "FORWARD", new=take):
        flex_attention(*parts, block_mask=block_mask)
    spec = parts[0].spec
    (b, h, n, _), (b0, h0, n0, _) = spec.local_shape_and_offset()
    expected = create_block_mask(
        lambda b, h, i, j: by_head_and_batch(b + b0, h + h0, i + n0, j), b, h, n, LENGTH, device="cpu", BLOCK_SIZE=BLOCK
    ).as_tuple()
    found = taken[-1][4]
    assert found[:2] == expected[:2] == (n, LENGTH)
    for one in (2, 4, 6, 8):
        assert torch.equal(dense(*found[one : one + 2]), dense(*expected[one : one + 2]))
        assert found[one + 1].shape == expected[one + 1].shape


@pytest.mark.parametrize(
    "placements", [pytest.param([Shard(dim)], marks=[] if dim == 2 else slow_sample()) for dim in (0, 1, 2)]
)
def test_a_rank_has_its_part_of_the_block_mask(ranks, placements):
    ranks.run(parts_of_a_mask, placements)


def sharded_keys():
    m = mesh_for([Shard(2)])
    found, sent = compare(m, operands(), [[Shard(2)]] * 3, lambda q, k, v: flex_attention(q, k, v, score_mod=by_index))
    assert found == (Shard(2),)
    assert {event.kind for event in sent} == {"all_gather"}


@pytest.mark.slow
@pytest.mark.sample
def test_keys_and_values_are_gathered_for_sharded_queries(ranks):
    ranks.run(sharded_keys)


# -- heads and batches of other numbers ------------------------------------------------------------------------------


def grouped(key_heads, stays, batch=BATCH, key_batch=None):
    m = mesh_for([Shard(1)])
    q, k, v = operands(key_heads, batch=batch)
    if key_batch is not None:
        k, v = (t[:key_batch].detach().requires_grad_() for t in (k, v))
    block_mask = masked(by_head_and_batch, batch, HEADS)
    of_keys = [Shard(1)] if key_heads > 1 else [Replicate()]
    found, sent = compare(
        m,
        [q, k, v],
        [[Shard(1)], of_keys, of_keys],
        lambda q, k, v: flex_attention(q, k, v, score_mod=by_index, block_mask=block_mask, enable_gqa=True),
    )
    assert (sent == []) is stays
    assert not stays or found == (Shard(1),)


@pytest.mark.parametrize(("key_heads", "stays"), [(4, True), pytest.param(1, True, marks=slow_sample())])
def test_grouped_heads(ranks, key_heads, stays):
    ranks.run(grouped, key_heads, stays)


@pytest.mark.slow
@pytest.mark.sample
def test_keys_of_one_batch_element_serve_all(two_ranks):
    two_ranks.run(grouped, HEADS, True, BATCH, 1)


@pytest.mark.slow
@pytest.mark.sample
def test_groups_that_the_ranks_cannot_share_evenly_are_gathered(pool):
    pool.run(grouped, 2, False)


def empty_shards(batch):
    m = mesh_for([Shard(0)])
    with sw.plain("replicate"):
        found, sent = compare(
            m,
            operands(batch=batch),
            [[Shard(0)]] * 3,
            lambda q, k, v: flex_attention(q, k, v, by_index, masked(by_head_and_batch, batch, HEADS)),
        )
    assert (found, sent) == ((Shard(0),), [])


@pytest.mark.slow
@pytest.mark.sample
def test_uneven_and_empty_shards(two_ranks):
    two_ranks.run(empty_shards, 3)
    two_ranks.run(empty_shards, 1)


# -- captured tensors and masks ------------------------------------------------------------------------------------


def learned(kind):
    """A table that is learned, captured by the score function: its gradient is that of one device."""
    m = mesh_for([Shard(1)])
    whole = torch.randn(HEADS, 2 * LENGTH, generator=torch.Generator().manual_seed(2)).requires_grad_()
    table = whole.detach().clone().requires_grad_()
    length = LENGTH
    if kind != "plain":
        table = sw.distribute_tensor(whole.detach(), m, [Shard(0) if kind == "sharded" else Replicate()])
        table.requires_grad_()

    def attend(q, k, v):
        bias = table if isinstance(q, sw.MeshTensor) else whole
        return flex_attention(q, k, v, score_mod=lambda score, _b, h, i, j: score + bias[h, i - j + length])

    compare(m, operands(), [[Shard(1)], [Shard(1)], [Shard(1)]], attend)
    grad = table.grad if kind == "plain" else table.grad.full_tensor()
    assert kind != "plain" or type(grad) is torch.Tensor
    torch.testing.assert_close(grad, whole.grad, **CLOSE)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("kind", ["replicated", "sharded", "plain"])
def test_a_learned_table_has_its_gradient(ranks, kind):
    ranks.run(learned, kind)


def mask_made_on_the_mesh():
    m = mesh_for([Shard(0)])
    plain = masked(same_document(documents), BATCH, None)
    with sw.on(m):
        ids = sw.distribute_tensor(documents, m, [Replicate()])
        block_mask = create_block_mask(same_document(ids), BATCH, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=BLOCK)
    q, k, v = (t.detach() for t in operands())
    expected = flex_attention(q, k, v, block_mask=plain)
    parts = [sw.distribute_tensor(t, m, [Shard(0)]) for t in (q, k, v)]
    found = flex_attention(*parts, block_mask=block_mask)
    assert found.placements == (Shard(0),)
    torch.testing.assert_close(found.full_tensor(), expected, **CLOSE)


@pytest.mark.slow
@pytest.mark.sample
def test_a_mask_that_is_made_on_the_mesh(ranks):
    ranks.run(mask_made_on_the_mesh)


def compared_captured():
    """By default the ranks compare a plain tensor that a function captures, once."""
    m = mesh_for([Shard(0)])
    slopes = torch.logspace(0, -3, HEADS)
    parts = [sw.distribute_tensor(t.detach(), m, [Shard(0)]) for t in operands()]
    flex_attention(*parts, score_mod=alibi(slopes))
    sent = []
    with events.observe(sent.append):
        flex_attention(*parts, score_mod=alibi(slopes))
    slopes = slopes + dist.get_rank()
    with pytest.raises(RankDisagreementError):
        flex_attention(*parts, score_mod=alibi(slopes))


@pytest.mark.slow
@pytest.mark.sample
def test_captured_plain_tensors_are_compared(two_ranks):
    two_ranks.run(compared_captured)


def statistics():
    m = mesh_for([Shard(1)])
    whole = [t.detach() for t in operands()]
    parts = [sw.distribute_tensor(t, m, [Shard(1)]) for t in whole]
    request = AuxRequest(lse=True)
    _, expected = flex_attention(*whole, score_mod=by_index, return_aux=request)
    _, found = flex_attention(*parts, score_mod=by_index, return_aux=request)
    assert found.lse.placements == (Shard(1),)
    torch.testing.assert_close(found.lse.full_tensor(), expected.lse, **CLOSE)


@pytest.mark.slow
@pytest.mark.sample
def test_the_logsumexp_of_the_scores(ranks):
    ranks.run(statistics)


# -- dtypes, partial operands, and what is refused -----------------------------------------------------------------


def of_dtype(dtype, close):
    block_mask = masked(by_head_and_batch, BATCH, HEADS)
    with sw.plain("replicate"):
        found, sent = compare(
            mesh_for([Shard(1)]),
            operands(dtype=dtype),
            [[Shard(1)]] * 3,
            lambda q, k, v: flex_attention(q, k, v, score_mod=by_index, block_mask=block_mask),
            close,
        )
    assert (found, sent) == ((Shard(1),), [])


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize(("dtype", "close"), [(torch.float64, 1e-10), (torch.bfloat16, 3e-2)])
def test_other_dtypes(two_ranks, dtype, close):
    two_ranks.run(of_dtype, dtype, {"rtol": close, "atol": close})


def partial_operands():
    """A rank's terms are added up first: neither the scores nor the weights are linear in them."""
    m = mesh_for([Shard(1)])
    whole = [t.detach() for t in operands()]
    parts = [sw.MeshTensor.from_local(t * (1 + 2 * r) / n**2, m, [Partial()]) for t in whole for r, n in [rank_of(m)]]
    bias = torch.randn(BATCH, HEADS, generator=torch.Generator().manual_seed(5))
    terms = sw.MeshTensor.from_local(bias / m.size(), m, [Partial()])
    found = flex_attention(*parts, score_mod=lambda score, b, h, i, j: score + terms[b, h] * (i - j))
    expected = flex_attention(*whole, score_mod=lambda score, b, h, i, j: score + bias[b, h] * (i - j))
    torch.testing.assert_close(found.full_tensor(), expected, **CLOSE)


def rank_of(m):
    return m.get_local_rank(), m.size()


@pytest.mark.slow
@pytest.mark.sample
def test_partial_operands_and_captured_tensors_are_reduced_first(ranks):
    ranks.run(partial_operands)


def refused():
    m = mesh_for([Shard(0)])
    parts = [sw.distribute_tensor(t.detach(), m, [Shard(0)]) for t in operands()]
    for size in ((2, None), (None, 2)):
        with sw.plain("replicate"), pytest.raises(NoStrategyError) as caught:
            flex_attention(*parts, block_mask=masked(by_head_and_batch, *size))
        assert "a query of 4 batch elements and 8 heads: " in str(caught.value)
        assert "create_block_mask with B and H of its global shape" in str(caught.value)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(*(t.detach().requires_grad_() for t in parts))


def test_a_block_mask_of_another_size_and_a_gradient_on_a_cpu_are_refused(two_ranks):
    two_ranks.run(refused)


# -- compiled ----------------------------------------------------------------------------------------------------


def compiled(name, placements, dynamic):
    torch._dynamo.reset()
    score, mask, batch, heads = FUNCTIONS[name]
    block_mask = masked(mask, batch, heads)
    m = mesh_for(placements)

    def attend(q, k, v):
        return flex_attention(q * 2, k, v, score_mod=score, block_mask=block_mask).relu()

    run = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with sw.plain("replicate"):
        found, _ = compare(
            m,
            operands(),
            [placements, *[[p if p != Shard(2) else Replicate() for p in placements]] * 2],
            lambda *parts: run(*parts) if isinstance(parts[0], sw.MeshTensor) else attend(*parts),
        )
    assert found == tuple(placements)


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Shard(2)]])
@pytest.mark.parametrize("name", ["by index", "alibi"])
def test_it_compiles(two_ranks, name, placements):
    two_ranks.run(compiled, name, placements, False, timeout=240)


def by_inductor(name, placements):
    torch._dynamo.reset()
    score, mask, batch, heads = FUNCTIONS[name]
    block_mask = masked(mask, batch, heads)
    whole = [t.detach() for t in operands()]
    of_keys = [Replicate()] if placements == [Shard(2)] else placements
    m = mesh_for(placements)
    parts = [sw.distribute_tensor(t, m, p) for t, p in zip(whole, (placements, of_keys, of_keys), strict=True)]
    run = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    with sw.plain("replicate"):
        found = run(*parts, score_mod=score, block_mask=block_mask)
    assert found.placements == tuple(placements)
    expected = flex_attention(*whole, score_mod=score, block_mask=block_mask)
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-4)


def of_views():
    """Views that are made in the graph, as of one projection for queries, keys and values."""
    torch._dynamo.reset()
    g = torch.Generator().manual_seed(0)
    together = torch.randn(BATCH, LENGTH, 3 * HEADS * WIDTH, generator=g)

    def attend(x):
        return flex_attention(*(t.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for t in x.chunk(3, -1)))

    m = mesh((2,))
    found = torch.compile(attend, fullgraph=True, dynamic=False)(sw.distribute_tensor(together, m, [Shard(0)]))
    torch.testing.assert_close(found.full_tensor(), attend(together), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.sample
def test_inductors_kernel_reads_views_from_where_they_begin(two_ranks):
    two_ranks.run(of_views, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize(
    "placements", [[Shard(0)], [Shard(1)], pytest.param([Shard(2)], marks=pytest.mark.sample)], ids=str
)
@pytest.mark.parametrize("name", ["by index", "window, capped"])
def test_inductors_kernel_reads_the_part_of_the_block_mask(two_ranks, name, placements):
    two_ranks.run(by_inductor, name, placements, timeout=280)
