"""Rules for products, attention and padding: what they print, the traps, and layers on real ranks."""

import math

import pytest
import samples_matmul
import torch
from attrs import evolve
from described import empty, rows_of, takes_partial
from torch.nn import functional

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.testing import mesh
from shardwise.testing.oracle import check_rule
from shardwise_matmul import attention, padding, products, sums

aten = torch.ops.aten
RULES = (*products.RULES, *sums.RULES, *attention.RULES, *padding.RULES)
FOR_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
FOR_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default


def rows(op, *args, **kwargs):
    """The rows of a call as text, those with a partial operand aside; ``*`` marks the lowered ones."""
    return [f"{row}{'*' * row.lowered}" for row in rows_of(op, *args, **kwargs) if not takes_partial(row)]


def kinds(op, *args, **kwargs):
    """The names of the rows with a partial operand."""
    return [row.name for row in rows_of(op, *args, **kwargs) if takes_partial(row)]


# -- products ----------------------------------------------------------------------------------------------------


def test_rows_of_mm():
    assert rows(aten.mm.default, empty(6, 4), empty(4, 3)) == [
        "shard m: [S(0), R] -> [S(0)]",
        "shard k: [S(1), S(0)] -> [P(sum)]",
        "shard n: [R, S(1)] -> [S(1)]",
        "R: [R, R] -> [R]",
    ]


def test_one_partial_operand_at_a_time():
    expected = ["sum, R -> sum", "R, sum -> sum", "avg, R -> avg", "R, avg -> avg"]
    assert kinds(aten.mm.default, empty(6, 4), empty(4, 3)) == expected


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((4,), (4,), ["[S(0), S(0)] -> [P(sum)]"]),
        ((5, 4), (4,), ["[S(0), R] -> [S(0)]", "[S(1), S(0)] -> [P(sum)]"]),
        ((4,), (2, 4, 3), ["[S(0), S(1)] -> [P(sum)]", "[R, S(0)] -> [S(0)]", "[R, S(2)] -> [S(1)]"]),
        (
            (2, 5, 4),
            (4, 3),
            ["[S(0), R] -> [S(0)]", "[S(1), R] -> [S(1)]", "[S(2), S(0)] -> [P(sum)]", "[R, S(1)] -> [S(2)]"],
        ),
    ],
)
def test_rows_of_matmul(left, right, expected):
    listed = [row.partition(": ")[2] for row in rows(aten.matmul.default, empty(*left), empty(*right))]
    assert listed == [*expected, "[R, R] -> [R]"]


# -- the bias trap: a whole addend is added once, not once a rank ------------------------------------------------


def test_rows_of_addmm():
    assert rows(aten.addmm.default, empty(3), empty(6, 4), empty(4, 3)) == [
        "shard n: [S(0), R, S(1)] -> [S(1)]",
        "shard m: [R, S(0), R] -> [S(0)]",
        "shard k: [R, S(1), S(0)] -> [P(sum)]*",
        "R: [R, R, R] -> [R]",
    ]


def test_a_bias_that_is_whole_goes_through_the_lowering_and_a_partial_one_does_not():
    lowered = {row.name: row.lowered for row in rows_of(aten.addmm.default, empty(3), empty(6, 4), empty(4, 3))}
    assert lowered["R, sum, R -> sum"]
    assert lowered["R, R, sum -> sum"]
    assert not lowered["sum, k, k -> sum"]
    assert lowered["avg, R, R -> avg"]  # for a factor that is infinite
    assert "sum, R, R -> sum" not in lowered


def test_an_addend_that_addmv_would_broadcast_is_left_whole():
    assert rows(aten.addmv.default, empty(1), empty(6, 4), empty(4)) == ["R: [R, R, R] -> [R]"]
    assert len(rows(aten.addmv.default, empty(6), empty(6, 4), empty(4))) == 3


def test_nothing_partial_goes_through_an_activation():
    listed = rows_of(aten._addmm_activation.default, empty(3), empty(6, 4), empty(4, 3))
    assert not any(isinstance(p, Partial) for row in listed for p in (*row.inputs, *row.outputs))


# -- padding -----------------------------------------------------------------------------------------------------


def test_rows_of_constant_pad():
    assert rows(aten.constant_pad_nd.default, empty(5, 7, 6), [0, 0, 1, -1]) == [
        "shard d0: [S(0)] -> [S(0)]",
        "shard d2: [S(2)] -> [S(2)]",
        "R: [R] -> [R]",
    ]


@pytest.mark.parametrize(("value", "more"), [(0, {"sum", "product"}), (1, {"product"}), (-2.0, set())])
def test_a_partial_tensor_is_padded_where_copies_of_the_value_reduce_to_it(value, more):
    names = {name.partition(" ")[0] for name in kinds(aten.constant_pad_nd.default, empty(5), [1, 1], value)}
    assert names == {"avg", "max", "min"} | more


# -- attention ---------------------------------------------------------------------------------------------------


def qkv(batch=4, heads=8, few=8, length=6, keys=5):
    return empty(batch, heads, length, 16), empty(batch, few, keys, 16), empty(batch, few, keys, 16)


def plain(found):
    return [row for row in found if not row.endswith("*")]


def test_rows_of_attention():
    assert plain(rows(FOR_CPU, *qkv())) == [
        "shard b1: [S(0), S(0), S(0), -] -> [S(0), S(0)]",
        "shard h: [S(1), S(1), S(1), -] -> [S(1), S(1)]",
        "shard q: [S(2), R, R, -] -> [S(2), S(2)]",
        "R: [R, R, R, -] -> [R, R]",
    ]


def test_a_row_with_empty_shards_goes_through_the_lowering():
    for row in rows_of(FOR_CPU, *qkv()):
        if any(isinstance(p, Shard) for p in row.inputs):
            assert row.lowered == (not row.nonempty)


def test_a_causal_mask_keeps_the_query_sequence_whole():
    names = [row.name for row in rows_of(FOR_CPU, *qkv(), 0.0, True)]
    assert "shard h" in names
    assert "shard q" not in names


def test_the_key_sequence_is_whole():
    for mask in (None, empty(6, 5)):
        listed = rows_of(FOR_CPU, *qkv(), attn_mask=mask)
        assert not any(p in row.inputs[1:3] for row in listed for p in (Shard(2), Shard(3)))
        assert Shard(1) not in [row.inputs[3] for row in listed]


def test_a_mask_follows_where_it_is_not_broadcast():
    listed = [row.partition(": ")[2] for row in plain(rows(FOR_CPU, *qkv(), attn_mask=empty(4, 1, 6, 5)))]
    assert listed == [
        "[S(0), S(0), S(0), S(0)] -> [S(0), S(0)]",
        "[S(1), S(1), S(1), R] -> [S(1), S(1)]",
        "[S(2), R, R, S(2)] -> [S(2), S(2)]",
        "[R, R, R, R] -> [R, R]",
    ]


def test_a_shard_of_query_heads_goes_with_its_own_key_heads():
    row = next(r for r in rows_of(FOR_CPU, *qkv(heads=8, few=2)) if r.name == "shard h")
    assert [p.dim for p in row.inputs[:3]] == [1, 1, 1]
    assert row.divides == ((0, 1, 2),)  # two key heads: two or one shards, not four


def test_one_key_head_serves_every_shard():
    row = next(r for r in rows_of(FOR_CPU, *qkv(heads=6, few=1)) if r.name == "shard h")
    assert row.inputs[:3] == (Shard(1), Replicate(), Replicate())
    assert row.divides == ()


def test_dropout_leaves_only_the_whole_row():
    assert [row.name for row in rows_of(FLASH, *qkv(), 0.1)] == ["R"]


def test_gradients_of_what_every_shard_used_are_partial_sums():
    q, k, v = qkv(few=1)
    listed = plain(rows(FOR_CPU_BACKWARD, q, q, k, v, q, empty(4, 8, 6), 0.0, False))
    assert [row.partition(" -> ")[2] for row in listed] == [
        "[S(0), S(0), S(0)]",
        "[S(1), P(sum), P(sum)]",
        "[S(2), P(sum), P(sum)]",
        "[R, R, R]",
    ]


def test_lengths_and_seeds_are_whole():
    assert "shard q: [S(2), R, R] -> [S(2), S(2), R, R, R, R, R]*" in rows(FLASH, *qkv())


@pytest.mark.parametrize(("length", "divides"), [(128, ((0, 2, 4),)), (32, None), (100, None)])
def test_a_padded_logsumexp_is_cut_only_between_blocks(length, divides):
    listed = [row for row in rows_of(EFFICIENT, *qkv(length=length), None, True) if row.name == "shard q"]
    assert [row.divides[0] for row in listed] == ([] if divides is None else list(divides) * len(listed))
    assert bool(listed) == (divides is not None)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are CUDA's")
@pytest.mark.parametrize("rule", [attention.ATTENTION, attention.ATTENTION_BACKWARD], ids=["forward", "backward"])
def test_the_oracle_accepts_the_real_kernels(rule):
    names = ("product_flash_attention.", "product_flash_attention_backward.", "cudnn_attention")
    chosen = {op: make for op, make in samples_matmul.SAMPLES.items() if any(name in str(op) for name in names)}

    # Not float16: sums of parts leave its range, and the samples have numbers near both of its ends.
    def in_half(make):
        return lambda: [([x.bfloat16() if is_float(x) else x for x in args], kwargs) for args, kwargs in make()]

    # A logsumexp, whose last dim is 1 in cuDNN's, stays float32: the kernel reads it so.
    def is_float(x):
        return isinstance(x, torch.Tensor) and x.dtype == torch.float32 and x.ndim == 4 and x.shape[-1] > 1

    with samples_matmul.cuda_kernels.on_gpu():
        ops = tuple(op for op in rule.ops if op in chosen)
        report = check_rule(evolve(rule, ops=ops), {op: in_half(chosen[op]) for op in ops}, cases=60)
    assert report.cases > 60


# -- on real ranks -----------------------------------------------------------------------------------------------

LAYOUTS = [((4,), [Shard(0)]), ((2, 2), [Shard(0), Shard(1)]), ((2, 2), [Replicate(), Shard(1)])]


def made(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[-1])


def same(found, expected):
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-5)


def two_layers(x_layout, up, bias_layout, down):
    """A block with its hidden dim sharded: the second product is a partial sum, to which the bias is added."""
    grid = mesh((2, 2))
    full = [made(5, 8), made(6, 8, seed=1), made(6, seed=2), made(4, 6, seed=3), made(4, seed=4)]
    layouts = (x_layout, up, bias_layout, down, [Replicate()] * 2)
    operands = [sw.distribute_tensor(t, grid, p) for t, p in zip(full, layouts, strict=True)]
    for tensors in (full, operands):
        for t in tensors:
            t.requires_grad_()

    def program(x, w1, b1, w2, b2):
        return functional.linear(functional.linear(x, w1, b1), w2, b2)

    y, expected = program(*operands), program(*full)
    same(y, expected)
    y.sum().backward()
    expected.sum().backward()
    for t, f in zip(operands, full, strict=True):
        assert t.grad.placements == t.placements
        same(t.grad, f.grad)


@pytest.mark.parametrize("batch", [Shard(0), Replicate()])
def test_linear_layers(pool, batch):
    split = [[Replicate(), Shard(d)] for d in (0, 0, 1)]
    pool.run(two_layers, [batch, Replicate()], *split)


def attend(shape, layout, sizes, causal):
    batch, heads, few, length = sizes
    full = [made(batch, n, length, 8, seed=i) for i, n in enumerate((heads, few, few))]
    operands = [sw.distribute_tensor(t, mesh(shape), layout) for t in full]
    for t in (*full, *operands):
        t.requires_grad_()

    def program(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != few)

    y, expected = program(*operands), program(*full)
    same(y, expected)
    (y * y).sum().backward()
    (expected * expected).sum().backward()
    for t, f in zip(operands, full, strict=True):
        same(t.grad, f.grad)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(4, 4, 4, 6), (5, 8, 2, 7), (2, 6, 1, 5), (1, 2, 2, 9)])
@pytest.mark.parametrize(("shape", "layout"), [*LAYOUTS, ((4,), [Shard(2)])])
def test_attention(pool, shape, layout, sizes, causal):
    pool.run(attend, shape, layout, sizes, causal)


def infer():
    """Inference mode dispatches linear and matmul as they are, so a sharded sequence needs no flattening."""
    x, w, b = made(3, 5, 8), made(6, 8, seed=1), made(6, seed=2)
    for layout in ([Shard(1)], [Shard(2)]):
        with torch.inference_mode():
            xs = sw.distribute_tensor(x, mesh((4,)), layout)
            ws = sw.distribute_tensor(w, mesh((4,)), [Shard(1)])
            bs = sw.distribute_tensor(b, mesh((4,)), [Replicate()])
            same(functional.linear(xs, ws, bs), functional.linear(x, w, b))
            same(xs @ ws.t(), x @ w.t())


def test_inference_mode(pool):
    pool.run(infer)


def grouped_products(where, experts, tokens):
    """A layer of experts, forward and backward; rows beyond the last group count nothing."""
    torch.manual_seed(0)
    x, w = torch.randn(12, 8), torch.randn(4, 8, 16)
    offs = torch.tensor([3, 3, 7, 12], dtype=torch.int32)
    alone = [t.clone().requires_grad_() for t in (x, w)]
    expected = aten._grouped_mm.default(*alone, offs)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    operands = [sw.distribute_tensor(t, mesh(where), p).requires_grad_() for t, p in ((x, tokens), (w, experts))]
    whole_offs = sw.distribute_tensor(offs, mesh(where))
    result = aten._grouped_mm.default(*operands, whole_offs)
    torch.testing.assert_close(result.full_tensor(), expected.detach())
    (result * sw.distribute_tensor(weights, mesh(where))).sum().backward()
    for ours, theirs in zip(operands, alone, strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    return [t.grad.placements for t in operands]


@pytest.mark.parametrize(
    ("experts", "tokens"),
    [([Shard(0)], [Replicate()]), ([Replicate()], [Shard(0)]), ([Shard(2)], [Replicate()]), ([Shard(1)], [Shard(1)])],
)
def test_experts_and_tokens(pool, experts, tokens):
    kept = pool.run(grouped_products, (4,), experts, tokens)[0]
    assert kept == [tuple(tokens), tuple(experts)]


def dropped_attention():
    """The math kernel, whose dropout is an op of its own, and a fused one, whose dropout draws from torch's default."""
    m = mesh((2, 2))
    q = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    with sw.random.on_one_device():
        sw.manual_seed(2)
        expected = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.4)
    for layout in ([Shard(0), Shard(1)], [Shard(2), Replicate()], [Replicate(), Shard(3)]):
        sw.manual_seed(2)
        x = sw.distribute_tensor(q, m, layout)
        result = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.4)
        torch.testing.assert_close(result.full_tensor(), expected)
    sw.random.set_state(torch.tensor([1, 0, 0, 0]))


def test_attention_with_dropout_draws_what_one_device_draws(pool):
    pool.run(dropped_attention)
