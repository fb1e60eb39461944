"""The oracle over every first-party rule with the kernels of a card."""

import os

import oracle_rules
import pytest
import torch
from attrs import evolve
from on_card import kernels_of
from test_oracle import EVERYDAY, RULES, judged

# Kernels that take no float32, in which the samples are; test_matmul.py has them.
HALF_ONLY = ("product_flash_attention.", "product_flash_attention_backward.", "cudnn_attention")

# What differed on an H200. The reasons are read off the values that came; no run looked closer.
UNLIKE = {
    "aten._embedding_bag.default": "sizes of bags that no backward reads are not written",
    "aten._embedding_bag_forward_only.default": "sizes of bags that no backward reads are not written",
    "aten.nll_loss2d_forward.default": "the total weight is not written without a reduction",
    "aten.nll_loss2d_forward.output": "the total weight is not written without a reduction",
    "aten.native_batch_norm_backward.default": "gradients that nobody asks for come as empty tensors",
    "aten.cudnn_batch_norm.default": "statistics come without training, too; the lowering leaves them out",
    "aten.avg_pool3d_backward.default": "the sign of zero depends on the kernel that the sizes choose",
    "aten.avg_pool3d_backward.grad_input": "the sign of zero depends on the kernel that the sizes choose",
    # In torch 2.11 without a mesh as well: x.cuda(), and an out= that is a transposed tensor.
    "aten.reflection_pad1d.out": "torch's kernel writes an out= that is not contiguous as if it were",
    "aten.reflection_pad1d_backward.grad_input": "torch's kernel writes an out= that is not contiguous as if it were",
    "aten.reflection_pad2d.out": "torch's kernel writes an out= that is not contiguous as if it were",
    "aten.reflection_pad2d_backward.grad_input": "torch's kernel writes an out= that is not contiguous as if it were",
}


def on_card():
    for param in RULES:
        plugin, rule = param.values
        if not isinstance(rule, Exception):
            left_out = (*HALF_ONLY, *UNLIKE)
            ops = tuple(op for op in rule.ops if not any(name in str(op) for name in left_out))
            if ops:
                yield pytest.param(plugin, evolve(rule, ops=ops), id=param.id)


@pytest.fixture
def card():
    """The kernels of the card. A kernel that failed an assertion ends all that its process may do there."""
    with kernels_of("cuda") as kernels, torch.backends.cudnn.flags(allow_tf32=False):
        yield kernels
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        if "PYTEST_XDIST_WORKER" in os.environ:  # which gets another process
            os._exit(1)
        pytest.exit(f"the card does nothing more for this process: {error}")


@pytest.mark.cuda
@pytest.mark.parametrize(("plugin", "rule"), list(on_card()))
def test_the_oracle_accepts_with_the_kernels_of_the_card(card, plugin, rule):
    report = judged(plugin, rule, cases=EVERYDAY)
    assert not report.refuted, "\n\n".join(map(str, report.refuted))
    left_out = oracle_rules.declared(plugin, "UNSAMPLED")
    assert set(report.unsampled) <= set(map(str, left_out))
