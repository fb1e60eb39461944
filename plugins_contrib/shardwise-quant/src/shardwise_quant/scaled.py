"""Products of float8 matrices with scales (``_scaled_mm``): one scale for a tensor, or one for each row.

Blocks of scales, float4 and swizzled scales are whole: their layouts have no dims to shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from attrs import frozen

from shardwise.errors import ShardingError
from shardwise.rule import REPLICATE, Call, Flow, LocalCall, TensorMeta, partial, rule_from
from shardwise_quant.padding import padded, up

__all__ = ["RULES"]

aten = torch.ops.aten

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
# Dtypes of results whose partial sums may be added up. In float8 that would round far more than one device does.
SUMMABLE = (torch.float32, torch.bfloat16, torch.float16)
# By device type, the number that must divide k and n (cuBLASLt; aten/src/ATen/native/cuda/Blas.cpp).
DIVISORS = {"cuda": 16}
# Scalings of _scaled_mm_v2 (torch.nn.functional.ScalingType), and the scales' plain order.
TENSORWISE, ROWWISE, PLAIN = 0, 1, 0


# -- what may be sharded -----------------------------------------------------------------------------------------


def _per_tensor(*scales: TensorMeta) -> bool:
    return all(prod(scale.shape) == 1 for scale in scales)


def _labels(a: TensorMeta, b: TensorMeta, m: int, n: int) -> tuple[Any, Any] | None:
    """Labels of both scales; ``None`` if there is neither one scale for the tensor nor one for each row."""
    if a.dtype != torch.float32 or b.dtype != torch.float32:
        return None
    if _per_tensor(a, b):
        return [None] * a.ndim, [None] * b.ndim
    return (["m", None], [None, "n"]) if (a.shape, b.shape) == ((m, 1), (1, n)) else None


def _flow(call: Call, scales: tuple[Any, Any] | None, *, summed: bool) -> Flow:
    """The flow of either op; it is long because scales are tensors in one op and lists in the other."""
    if scales is None or call.args["self"].dtype not in FLOAT8:
        return Flow([None] * len(call.operands), [None], lowered=("*", "R"))
    labels = {"self": ["m", "k"], "mat2": ["k", "n"], "bias": ["n"], "scale_a": scales[0], "scale_b": scales[1]}
    named = [labels.get(name.partition("[")[0]) for name in call.operand_names]
    return Flow(
        [None if meta is None else dims for meta, dims in zip(call.operands, named, strict=True)],
        [["m", "n"]],
        reduce={"k": "sum"} if summed else {},
        replicate=() if summed else {"k"},
        lowered=("*", "R"),
    )


# -- on a shard --------------------------------------------------------------------------------------------------


def _bias_once(local: LocalCall, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The bias on the first rank along every mesh dim whose partial results are summed; zeros on the other ranks.

    The others pass zeros and not ``None``: if the device refuses the bias, every rank must raise, or some would wait.
    """
    if bias is None:
        return None
    result, spec = local.outputs[0], local.spec("bias")
    assert result is not None
    later = any(
        index and result.placements[mesh_dim] == partial("sum") and spec.placements[mesh_dim] == REPLICATE
        for mesh_dim, index in enumerate(local.coordinate)
    )
    return torch.zeros_like(bias) if later else bias


@frozen
class _Product:
    """One rank's product. ``run(a, b, scale_a, scale_b, bias)`` is the op; ``rowwise``: each row has a scale."""

    run: Callable[..., Any]
    dtype: torch.dtype
    rowwise: bool
    whole_k: int

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The product, with sizes and strides that the device accepts."""
        (m, k), n = a.shape, b.shape[1]
        if 0 in (m, n) or (k == 0 and self.whole_k):
            # Without columns and with a bias, torch's CPU kernel leaves the result uninitialised.
            blank = a.new_zeros((m, n), dtype=torch.float32)
            return (blank if bias is None else blank + bias).to(self.dtype)
        multiple = DIVISORS.get(a.device.type, 1)
        deep, wide = up(k, multiple), up(n, multiple)
        product: torch.Tensor = self.run(
            padded(a, (m, deep)),
            # CUDA needs the second factor column-major.
            padded(b.t(), (wide, deep)).t(),
            scale_a.contiguous(),
            padded(scale_b, (1, wide)) if self.rowwise else scale_b,
            None if bias is None else padded(bias, (wide,)),
        )
        return product if wide == n else product[:, :n].contiguous()


def _scaled(
    local: LocalCall,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *rest: Any,
) -> torch.Tensor:
    if _is_whole(local, local.arg("scale_a"), local.arg("scale_b")):
        whole: torch.Tensor = local.call.op(a, b, scale_a, scale_b, bias, *rest)
        return whole

    def run(*operands: Any) -> Any:
        return local.call.op(*operands, *rest)

    rowwise = not _per_tensor(local.arg("scale_a"), local.arg("scale_b"))
    product = _Product(run, local.arg("out_dtype") or a.dtype, rowwise, local.arg("self").shape[1])
    return product(a, b, scale_a, scale_b, _bias_once(local, bias))


def _scaled_v2(  # noqa: PLR0913, PLR0917  the op's arguments in order
    local: LocalCall,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: Sequence[torch.Tensor],
    recipe_a: Sequence[int],
    swizzle_a: Sequence[int],
    scale_b: Sequence[torch.Tensor],
    recipe_b: Sequence[int],
    swizzle_b: Sequence[int],
    bias: torch.Tensor | None,
    *rest: Any,
) -> torch.Tensor:
    if len(scale_a) != 1 or len(scale_b) != 1 or _is_whole(local, *local.arg("scale_a"), *local.arg("scale_b")):
        whole: torch.Tensor = local.call.op(
            a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, *rest
        )
        return whole

    def run(left: Any, right: Any, of_left: Any, of_right: Any, added: Any) -> Any:
        scales = [of_left], recipe_a, swizzle_a, [of_right], recipe_b, swizzle_b
        return local.call.op(left, right, *scales, added, *rest)

    rowwise = tuple(recipe_b) == (ROWWISE,)
    product = _Product(run, local.arg("out_dtype") or a.dtype, rowwise, local.arg("self").shape[1])
    return product(a, b, scale_a[0], scale_b[0], _bias_once(local, bias))


def _is_whole(local: LocalCall, scale_a: TensorMeta, scale_b: TensorMeta) -> bool:
    """Whether the call has only the whole row; then the op runs with the call's own arguments."""
    left = local.arg("self")
    return left.dtype not in FLOAT8 or _labels(scale_a, scale_b, left.shape[0], local.arg("mat2").shape[1]) is None


# -- rules -------------------------------------------------------------------------------------------------------


# torch's own meta kernel asks of every device what CUDA asks: multiples of 16, and a column-major second factor.


def _result(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:  # noqa: PLR2004  matrices
        raise ShardingError(
            asked="multiply float8 matrices",
            found=f"their shapes are {tuple(a.shape)} and {tuple(b.shape)}",
            do="Give [m, k] and [k, n].",
        )
    if bias is not None and bias.shape != b.shape[1:]:
        raise ShardingError(
            asked=f"add a bias to a product of {b.shape[1]} columns",
            found=f"its shape is {tuple(bias.shape)}",
            do="Give one value for each column.",
        )
    return a.new_empty((a.shape[0], b.shape[1]), dtype=dtype or a.dtype)


def _meta(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    return _result(a, b, bias, out_dtype)


def _meta_v2(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
    bias, out_dtype = rest[6:8]
    return _result(a, b, bias, out_dtype)


@rule_from(aten._scaled_mm.default, lowering=_scaled, meta=_meta, replaces="shardwise")
def SCALED_MM(
    self: TensorMeta,
    mat2: TensorMeta,
    scale_a: TensorMeta,
    scale_b: TensorMeta,
    bias: TensorMeta | None,
    scale_result: TensorMeta | None,
    out_dtype: torch.dtype | None,
    call: Call,
) -> Flow:
    """Named dims m k, k n -> m n with a scale for the tensor or for each row; k if the result's dtype can be summed."""
    summed = out_dtype in SUMMABLE and scale_result is None
    return _flow(call, _labels(scale_a, scale_b, self.shape[0], mat2.shape[1]), summed=summed)


@rule_from(aten._scaled_mm_v2.default, lowering=_scaled_v2, meta=_meta_v2, replaces="shardwise")
def SCALED_MM_V2(call: Call) -> Flow:
    """As _scaled_mm, for the scalings tensorwise and rowwise; with any other scaling, all is whole."""
    args = call.args
    recipes = {tuple(args["recipe_a"]), tuple(args["recipe_b"])}
    plain = {tuple(args["swizzle_a"]), tuple(args["swizzle_b"])} <= {(), (PLAIN,)}
    scales = None
    if plain and recipes in ({(TENSORWISE,)}, {(ROWWISE,)}) and not args["contraction_dim"]:
        labels = _labels(args["scale_a"][0], args["scale_b"][0], args["self"].shape[0], args["mat2"].shape[1])
        scales = labels if _per_tensor(args["scale_b"][0]) or recipes == {(ROWWISE,)} else None
    return _flow(call, scales, summed=args["out_dtype"] in SUMMABLE)


RULES = (SCALED_MM, SCALED_MM_V2)
