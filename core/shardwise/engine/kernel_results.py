"""What the kernel of a device says of a call that the meta device refuses.

The meta device stands for all devices, and torch has written most of it in Python. It refuses calls that a kernel
takes (complex numbers in ``nan_to_num_``, an ``out=`` of flags), and raises errors of other types for what a kernel
refuses as well. So a call that it refuses runs once on made-up operands of the same shapes, if they are small: then
either the results are known, or the error is the one that one device raises.

A kernel of a card is not asked: see :mod:`shardwise.engine.kernel_dtypes`. Nor is a private op, whose kernel may trust
what torch gives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.engine.kernel_dtypes import is_safe_to_ask, run_on_ones
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import flat_metas

__all__ = ["as_of_kernel", "metas_by_kernel"]


def metas_by_kernel(schema: OpSchema, values: Sequence[Any], refusal: Exception) -> tuple[TensorMeta | None, ...]:
    """The metas of the results of a call, or the error that its kernel raises.

    ``refusal`` is what the meta device raises. It is raised again where the kernel cannot be asked.
    """
    is_private = schema.op.__name__.startswith("_")
    if schema.mesh.device_type != "cpu" or is_private or not is_safe_to_ask(schema.op, values):
        raise refusal
    error, results = run_on_ones(schema.op, "cpu", values)
    if error is not None:
        raise error.with_traceback(None)
    return tuple(flat_metas(results))


def as_of_kernel(refusal: Exception) -> Exception:
    """What the meta device raises, or a ``RuntimeError`` in place of a failed assertion or division of torch's Python
    code: no kernel raises those.
    """
    return RuntimeError(*refusal.args) if isinstance(refusal, (AssertionError, ArithmeticError)) else refusal
