"""The rules: what they print, and what the oracle says of them, and of some without their conditions."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from shardwise import Replicate
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import make_call
from shardwise.rule import AbstractMesh, OpSchema, TensorMeta, TensorSpec, rule
from shardwise.testing import RuleRefuted, check_rule
from shardwise_quant import blocked, dynamic, integers, packed, samples, scaled
from shardwise_quant import sample_kernels as cuda_kernels

aten = torch.ops.aten
RULES = (*integers.RULES, *packed.RULES, *scaled.RULES, *dynamic.RULES)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here")


def rows(op, *args):
    """The rows of a call as text without those that have a partial operand; what must divide is behind them."""
    of = next(r for r in RULES if op in r.ops)

    def spec(value):
        if isinstance(value, list):
            return [spec(v) for v in value]
        tensor = isinstance(value, torch.Tensor)
        return TensorSpec(AbstractMesh((2,)), [Replicate()], TensorMeta.of(value)) if tensor else value

    schema = OpSchema.of(op, *map(spec, args), static=of.static)
    found = of.rows(make_call(of, schema, output_metas(op, schema.values, of.meta)))
    plain = [r for r in found if not any(p is not None and p.is_partial() for p in r.inputs)]
    return [f"{r}{f' of {r.divides[0][2]}' if r.divides else ''}" for r in plain]


def empty(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


# -- the oracle --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", RULES, ids=lambda r: str(r).partition(":")[0])
def test_the_oracle_accepts(of):
    report = check_rule(of, samples.SAMPLES, cases=250)
    assert not report.unexercised
    assert set(report.unsampled) <= set(map(str, samples.UNSAMPLED))


def test_a_packed_weight_must_not_be_cut_inside_a_block():
    if blocked.block_rows() == 16:
        pytest.skip("this CPU packs blocks of 16 rows, the fewest that torch packs")
    careless = rule(
        aten._weight_int4pack_mm_for_cpu.default, {"self": "m _", "mat2": "n _", "qScaleAndZeros": "_ n _", "->": "m n"}
    )
    calls = [(list(call), {}) for call in samples.int4(samples_pack, [(5, 64, 64, 32)])]
    with pytest.raises(RuleRefuted, match="shard n"):
        check_rule(careless, calls, meshes=[(4,)])
    assert not check_rule(packed.MM_FOR_CPU, calls, meshes=[(4,)]).refuted


def samples_pack(weight):
    return aten._convert_weight_to_int4pack_for_cpu(weight, 1)


def test_packing_must_not_be_cut_inside_a_block():
    if blocked.block_rows() == 16:
        pytest.skip("this CPU packs blocks of 16 rows, the fewest that torch packs")
    careless = rule(aten._convert_weight_to_int4pack_for_cpu.default, "n _ -> n _")
    call = [samples.whole(64, 8, low=0, high=16, dtype=torch.int32), 1], {}
    with pytest.raises(RuleRefuted, match="shard n"):
        check_rule(careless, [call], meshes=[(4,)])


CARELESS = """
import torch
from shardwise.rule import rule
from shardwise.testing import check_rule
careless = rule(torch.ops.aten._weight_int8pack_mm.default, "m k, n k, n -> m n", reduce={"k": "sum"})
x, scales = torch.ones(5, 48, dtype=torch.bfloat16), torch.ones(6, dtype=torch.bfloat16)
check_rule(careless, [([x, torch.ones(6, 48, dtype=torch.int8), scales], {})], meshes=[(4,)])
"""


@pytest.mark.skipif(not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="the kernel of x86")
def test_twelve_columns_of_bfloat16_need_padding():
    """Without it the kernel reads past the end of a shard: a wrong number or a crash, so in a process of its own."""
    done = subprocess.run([sys.executable, "-c", CARELESS], capture_output=True, text=True, check=False)
    assert done.returncode < 0 or "RuleRefuted" in done.stderr


# -- what they print ---------------------------------------------------------------------------------------------


def test_rows_of_int_mm():
    a, b = empty(6, 8, dtype=torch.int8), empty(8, 5, dtype=torch.int8)
    assert rows(aten._int_mm.default, a, b) == [
        "shard m: [S(0), R] -> [S(0)]",
        "shard k: [S(1), S(0)] -> [P(sum)]",
        "shard n: [R, S(1)] -> [S(1)]",
        "R: [R, R] -> [R]",
    ]


@pytest.mark.parametrize(("n", "cut"), [(256, " of 4"), (192, " of 3"), (96, None), (64, None)])
def test_rows_of_a_packed_weight(n, cut):
    x, weight, scales = empty(5, 64), empty(n, 32, dtype=torch.uint8), empty(2, n, 2)
    expected = ["shard m: [S(0), R, R] -> [S(0)]", f"shard n: [R, S(0), S(1)] -> [S(1)]{cut}", "R: [R, R, R] -> [R]"]
    found = rows(aten._weight_int4pack_mm_for_cpu.default, x, weight, 32, scales)
    assert found == (expected if cut else [expected[0], expected[2]])


def test_rows_of_a_blocked_weight():
    x, weight, scales = empty(5, 192), empty(4, 192, 32, dtype=torch.uint8), empty(3, 256, 2)
    assert rows(torch.ops.shardwise_quant.int4_linear.default, x, weight, scales, 64) == [
        "shard m: [S(0), R, R] -> [S(0)]",
        "shard k: [S(1), S(1), S(0)] -> [P(sum)] of 3",
        "shard n: [R, S(0), S(1)] -> [S(1)] of 4",
        "R: [R, R, R] -> [R]",
    ]


def test_rows_of_a_weight_packed_for_cuda():
    x, weight = empty(5, 512, dtype=torch.bfloat16), empty(8, 8, 32, 2, dtype=torch.int32)
    assert rows(aten._weight_int4pack_mm.default, x, weight, 128, empty(4, 64, 2, dtype=torch.bfloat16)) == [
        "shard m: [S(0), R, R] -> [S(0)]",
        "shard k: [S(1), S(1), S(0)] -> [P(sum)] of 4",  # a group is two steps of 64 columns
        "shard n: [R, S(0), S(1)] -> [S(1)] of 8",
        "R: [R, R, R] -> [R]",
    ]


def test_a_weight_of_broken_tiles_is_not_packed_for_cuda():
    """The device and the meta device disagree on how many tiles it has."""
    assert rows(aten._convert_weight_to_int4pack.default, empty(12, 64, dtype=torch.uint8), 2) == []
    assert len(rows(aten._convert_weight_to_int4pack.default, empty(16, 64, dtype=torch.uint8), 2)) == 3


F8 = torch.float8_e4m3fn


def scaled_rows(of_a, of_b, *, bias=None, result=None, dtype=torch.bfloat16):
    a, b = empty(32, 48, dtype=F8), empty(16, 48, dtype=F8).t()
    return rows(aten._scaled_mm.default, a, b, of_a, of_b, bias, result, dtype)


def test_scales_of_rows_follow_their_rows():
    assert scaled_rows(empty(32, 1), empty(1, 16), bias=empty(16)) == [
        "shard m: [S(0), R, S(0), R, R, -] -> [S(0)]",
        "shard k: [S(1), S(0), R, R, R, -] -> [P(sum)]",
        "shard n: [R, S(1), R, S(1), S(0), -] -> [S(1)]",
        "R: [R, R, R, R, R, -] -> [R]",
    ]


@pytest.mark.parametrize("options", [{"dtype": F8}, {"dtype": None}, {"result": empty()}])
def test_pieces_are_not_added_up_in_float8(options):
    assert [r.partition(":")[0] for r in scaled_rows(empty(), empty(), **options)] == ["shard m", "shard n", "R"]


def test_scales_of_blocks_are_whole():
    a, b = empty(256, 256, dtype=F8), empty(256, 256, dtype=F8).t()
    assert len(rows(aten._scaled_mm.default, a, b, empty(256, 2), empty(2, 2), None, None, torch.bfloat16)) == 1
    blocks = [[empty(256, 2)], [4], [0], [empty(2, 2)], [5], [0]]
    assert len(rows(aten._scaled_mm_v2.default, a, b, *blocks, None, torch.bfloat16)) == 1


# -- what a device asks of sizes ---------------------------------------------------------------------------------


def test_shards_too_small_for_cuda_are_padded(monkeypatch):
    real, seen = aten._int_mm.default, []

    def strict(left, right):
        assert left.shape[0] > 16
        assert left.shape[1] % 8 == right.shape[0] % 8 == right.shape[1] % 8 == 0
        seen.append(left.shape)
        return real(left, right)

    monkeypatch.setattr(integers, "INT_MM_TAKES", {"cpu": integers.INT_MM_TAKES["cuda"]})
    monkeypatch.setattr(integers, "aten", SimpleNamespace(_int_mm=SimpleNamespace(default=strict)))
    check_rule(integers.INT_MM, samples.SAMPLES, cases=100)
    assert len(seen) > 100


def test_float8_shards_are_made_as_cuda_takes_them(monkeypatch):
    monkeypatch.setattr(scaled, "DIVISORS", {"cpu": scaled.DIVISORS["cuda"]})
    kept, seen = scaled._Product.__call__, []

    def strict(self, *operands):
        def run(a, b, of_a, of_b, bias):
            assert a.is_contiguous()
            assert b.t().is_contiguous()
            assert a.shape[1] % 16 == b.shape[1] % 16 == 0
            assert of_b.numel() == (b.shape[1] if self.rowwise else 1)
            assert bias is None or bias.shape == b.shape[1:]
            seen.append(a.shape)
            return self.run(a, b, of_a, of_b, bias)

        return kept(scaled._Product(run, self.dtype, self.rowwise, self.whole_k), *operands)

    monkeypatch.setattr(scaled._Product, "__call__", strict)
    check_rule(scaled.SCALED_MM, samples.SAMPLES, cases=150)
    assert len(seen) > 150


@pytest.mark.cuda
@on_cuda
@pytest.mark.parametrize("inner", [2, 4, 8])
def test_the_stand_in_packs_as_cuda_does(inner):
    weight = samples.whole(32, 128, low=0, high=256, dtype=torch.uint8)
    real = aten._convert_weight_to_int4pack(weight.cuda(), inner)
    assert torch.equal(cuda_kernels.pack(weight, inner), real.cpu())
    x, scales = samples.normal(5, 256, dtype=torch.bfloat16), samples.positive(8, 32, 2, dtype=torch.bfloat16)
    found = aten._weight_int4pack_mm(x.cuda(), real, 32, scales.cuda()).cpu()
    torch.testing.assert_close(found, cuda_kernels.mm(x, real.cpu(), 32, scales), rtol=2e-2, atol=2e-1)


@pytest.mark.cuda
@on_cuda
@pytest.mark.parametrize("sizes", [(3, 5, 7), (17, 8, 8), (40, 24, 9), (0, 8, 8), (4, 0, 3)])
def test_int_mm_of_small_shards_on_cuda(sizes):
    m, k, n = sizes
    a, b = samples.whole(m, k), samples.whole(k, n, seed=1)
    local = SimpleNamespace(call=SimpleNamespace(op=aten._int_mm.default))
    assert torch.equal(integers._int_mm(local, a.cuda(), b.cuda()).cpu(), aten._int_mm(a, b))
