"""What the tests of random programs share: sample calls of every first-party rule, and programs drawn from them."""

from __future__ import annotations

import random
from functools import cache

import cuda_kernels
import oracle_rules
import torch

from shardwise.testing.programs import Catalogue, check_program, draw, shrink
from shardwise.testing.strategies import grids

aten = torch.ops.aten

# What one device gets wrong, so that it is no judge.
WRONG_ON_ONE_DEVICE = {
    aten.narrow_copy.out: "writes as if out= were contiguous",
    aten._embedding_bag.default: "leaves out the bag of each index where it can, which a mesh always has",
    aten._embedding_bag_forward_only.default: "as _embedding_bag",
    aten.lift.default: "returns its operand, whose gradient is then that of the result",
    aten.lift_fresh.default: "as lift",
    aten.adaptive_max_pool3d_backward.default: "reads the indices as if they were dense, and beyond their memory",
    aten._weight_norm_interface.default: "writes the norms beyond their memory where g is expanded",
    aten.fractional_max_pool2d_backward.default: "as adaptive_max_pool3d_backward",
    aten.fractional_max_pool3d_backward.default: "as adaptive_max_pool3d_backward",
    aten.triu.out: "takes the batch dims of out= as one, and writes beyond its memory where they are not in order",
    aten.tril.out: "as triu.out",
    aten.lu_unpack.out: "writes L and U by tril.out and triu.out",
    aten.linalg_lu.out: "as lu_unpack.out",
    aten._convert_indices_from_csr_to_coo.default: "writes beyond its result by rows that count too many",
    aten._convert_indices_from_csr_to_coo.out: "as _convert_indices_from_csr_to_coo",
} | {
    getattr(packet, overload): "reads and writes as if all its tensors were dense, in one order"
    for packet in (aten._fused_adagrad_, aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_)
    for overload in packet.overloads()
}

# Tensors of eight-bit floats cannot be sent between processes: pickle cannot load them.
OF_EIGHT_BITS = {
    getattr(packet, overload)
    for packet in (getattr(aten, name) for name in ("_scaled_mm", "_scaled_mm_v2") if hasattr(aten, name))
    for overload in packet.overloads()
}


@cache
def catalogue():
    """The sample calls of every first-party rule."""
    matmul = oracle_rules.samples_file("shardwise-matmul")
    # Torch runs no vmap, by which a CPU computes these, in what its dispatcher calls. A program calls them through the
    # operator of higher order, as in tests/plugins/test_flex.py.
    inner = {matmul.FLEX, matmul.FLEX_BACKWARD}
    # A function of autograd calls these, and gives their gradients, as in tests/plugins/test_math_attention.py.
    inner |= {matmul.math_attention.FORWARD, matmul.math_attention.BACKWARD}
    only_here = {_overload(name) for name in cuda_kernels.KERNELS}
    # Torch has this one where its compiler has been imported: in this process perhaps, in the workers not.
    compilers = {torch.ops.prims.fma.default} if hasattr(torch.ops.prims, "fma") else set()
    catalogue = Catalogue()
    for plugin in oracle_rules.first_party():
        rules, error = oracle_rules.rules_of(plugin)
        assert error is None
        samples = oracle_rules.declared(plugin.origin.plugin, "SAMPLES")
        catalogue.add(rules, samples, without={*WRONG_ON_ONE_DEVICE, *OF_EIGHT_BITS, *only_here, *inner, *compilers})
    return catalogue


def _overload(name):
    base, _, overload = name.partition(".")
    return getattr(getattr(aten, base), overload or "default")


def drawn_program(ranks, seed):
    """The program of a seed, on a mesh of so many ranks."""
    rng = random.Random(seed)  # noqa: S311  # chance, no secret
    return draw(catalogue(), rng, rng.choice(grids(ranks, 3)))


def check(pool, program, *, small=True):
    """Run a program and raise with the smallest one that goes wrong in the same line."""
    verdict = check_program(program, pool)
    if verdict.wrong:
        where = _place(program, verdict)
        if small:
            program = shrink(program, lambda p: (v := check_program(p, pool)).wrong and _place(p, v) == where)
            verdict = check_program(program, pool)
        raise AssertionError(f"{verdict.wrong}\n\n{program}")
    return verdict


def _place(program, verdict):
    line = program.lines[verdict.at] if isinstance(verdict.at, int) else verdict.at
    return getattr(line, "op", type(line).__name__)
