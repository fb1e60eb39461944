"""Least squares, whose results beside the solution depend on the driver."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.rule import Call, Flow, TensorMeta, rule_from, whole
from shardwise_linalg.batches import matrices, ops, raise_together

__all__ = ["RULES"]

# The driver that torch uses if the call names none, by device type.
DEFAULT = {"cpu": "gelsy"}
ELSEWHERE = "gels"
# Drivers that find singular values; they give no residuals where any matrix of the batch lacks full rank.
SINGULAR = ("gelsd", "gelss")


def _is_vector(a: Sequence[int], b: Sequence[int]) -> bool:
    return len(b) == 1 or (len(a) - 1 == len(b) and tuple(a[:-1]) == tuple(b))


def _on_meta(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None, **out: Tensor
) -> tuple[Tensor, ...]:
    """The results of lstsq on the meta device, where torch has no kernel; the default driver is the CPU's."""
    if out:
        return tuple(out.values())
    vector = _is_vector(a.shape, b.shape)
    right = b.unsqueeze(-1) if vector else b
    if a.ndim < 2 or right.ndim < 2 or a.shape[-2] != right.shape[-2]:  # noqa: PLR2004  matrices
        raise RuntimeError(f"torch.linalg.lstsq: {tuple(b.shape)} is not a right-hand side for {tuple(a.shape)}.")
    *batch, m, n = a.shape
    full = torch.broadcast_shapes(batch, right.shape[:-2])  # type: ignore[no-untyped-call]
    rows, columns = max(m, n), right.shape[-1]
    solution = a.new_empty((*full, columns, rows)).transpose(-1, -2)[..., :n, :]
    chosen = driver or DEFAULT["cpu"]
    residuals = _residuals(a, chosen, (*full, columns))
    rank = a.new_empty((0,) if chosen == ELSEWHERE else batch, dtype=torch.int64)
    values = (*batch, min(m, n)) if chosen in SINGULAR else (0,)
    return (
        solution.squeeze(-1) if vector else solution,
        residuals,
        rank,
        a.new_empty(values, dtype=a.dtype.to_real()),
    )


def _residuals(a: Tensor, driver: str, shape: Sequence[int]) -> Tensor:
    overdetermined = a.shape[-2] > a.shape[-1]
    if driver in SINGULAR and overdetermined:
        raise NotImplementedError("whether there are residuals depends on the ranks of the matrices")
    return a.new_empty(shape if overdetermined and driver == ELSEWHERE else (0,), dtype=a.dtype.to_real())


def _results(call: Call, device_type: str) -> Sequence[TensorMeta | None]:
    """By the driver of the device, if the call names none."""
    if call.args["driver"] or call.out_operands or device_type in DEFAULT or None in call.outputs:
        return call.outputs
    a, b = (call.args[name].to_meta_tensor() for name in ("self", "b"))
    return [TensorMeta.of(result) for result in _on_meta(a, b, driver=ELSEWHERE)]


@rule_from(
    ops("linalg_lstsq.default linalg_lstsq.out"),
    static=("rcond",),
    lowering=raise_together,
    meta=_on_meta,
    results=_results,
)
def LEAST_SQUARES(self: TensorMeta, b: TensorMeta, call: Call) -> Flow:
    """Batch dims pass, and the right-hand sides; whole if a result's shape depends on the ranks of matrices.

    It is long because torch's kernels fail on empty shards in two cases, so some dims must not be empty.
    """
    if None in call.outputs:
        return whole(call)
    right, sums = ("_", "_") if _is_vector(self.shape, b.shape) else ("_ n", "n")
    # With singular values, torch's CPU kernels crash without a right-hand side. And a rank without a batch element does
    # not check matrices that all batch elements share.
    solution = call.outputs[0]
    assert solution is not None
    shared = self.shape[:-2] != solution.shape[: solution.ndim - len(right.split())]
    nonempty = ["n", *(f"b{i + 1}" for i in range(solution.ndim) if shared)]
    return matrices(call, f"_ _, {right} -> {right}, {sums}, (), _", lowered="*", nonempty=nonempty)


RULES = (LEAST_SQUARES,)
