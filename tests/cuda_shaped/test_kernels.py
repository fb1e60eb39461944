"""The kernels that composite ops choose on a described card, by the conditions in torch's sources."""

import pytest
import torch
from torch.nn import functional

from shardwise.private_torch.absent_card import Card, as_on
from shardwise.private_torch.dispatch import watching
from shardwise.private_torch.fake import fake_tensors

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="torch chooses for the card that is there")

HOPPER, AMPERE, ADA, TURING = (Card(capability=c) for c in ((9, 0), (8, 0), (8, 9), (7, 5)))
OLD_CUDNN = Card(cudnn=90100)
BEFORE_2_12 = torch.__version__ < "2.12"  # cuDNN's kernel took any dropout, and wider heads
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def ops_of(card, call):
    """The names of the ops that a call runs as on a card."""
    ops = []

    def note(op, args, kwargs):
        ops.append(str(op).removeprefix("aten.").removesuffix(".default"))
        return op(*args, **kwargs)

    with fake_tensors(), as_on("cuda", card), watching(note, lambda _: False):
        call()
    return ops


def attention(*, dtype=BF16, heads=(4, 4), lengths=(128, 128), width=64, mask=None, grad=True, **options):
    def call():
        query = torch.empty(2, heads[0], lengths[0], width, dtype=dtype, requires_grad=grad)
        key, value = (torch.empty(2, heads[1], lengths[1], width, dtype=dtype, requires_grad=grad) for _ in range(2))
        bias = None if mask is None else torch.zeros(lengths, dtype=mask)
        out = functional.scaled_dot_product_attention(
            query, key, value, bias, enable_gqa=heads[0] != heads[1], **options
        )
        assert out.shape == query.shape
        if grad:
            out.sum().backward()
            assert [t.grad.shape for t in (query, key, value)] == [t.shape for t in (query, key, value)]

    return call


@pytest.mark.parametrize(
    ("card", "call", "kernel"),
    [
        (HOPPER, attention(), "cudnn"),
        (HOPPER, attention(dtype=F16, is_causal=True), "cudnn"),
        (HOPPER, attention(heads=(4, 2)), "cudnn"),
        (HOPPER, attention(dropout_p=0.1), "cudnn" if BEFORE_2_12 else "flash"),  # cuDNN drops multiples of 1/16
        (HOPPER, attention(dropout_p=0.125), "cudnn"),
        (HOPPER, attention(width=256), "cudnn" if BEFORE_2_12 else "flash"),
        (HOPPER, attention(mask=torch.bool), "cudnn"),
        (HOPPER, attention(dtype=F32), "efficient"),
        (HOPPER, attention(dtype=F64), "math"),
        (OLD_CUDNN, attention(), "flash"),
        (AMPERE, attention(), "flash"),
        (AMPERE, attention(width=60), "flash"),  # padded to a multiple of eight
        (AMPERE, attention(mask=BF16), "efficient"),
        (AMPERE, attention(lengths=(130, 130), mask=BF16), "efficient"),
        (AMPERE, attention(lengths=(64, 128), is_causal=True, heads=(4, 2)), "math"),
        (AMPERE, attention(lengths=(64, 128), is_causal=True), "efficient"),
        (AMPERE, attention(dtype=F32, width=30), "math"),
        (AMPERE, attention(width=224), "flash"),
        (ADA, attention(width=224), "efficient"),
        (ADA, attention(width=224, grad=False), "flash"),
        (TURING, attention(dtype=F16), "efficient"),
        (TURING, attention(dtype=BF16), "math"),
    ],
)
def test_attention(card, call, kernel):
    ops = ops_of(card, call)
    chosen = {name.split("_")[4] for name in ops if "scaled_dot_product" in name and "for_cpu" not in name}
    assert chosen == (set() if kernel == "math" else {kernel})
    assert ("_safe_softmax" in ops) == (kernel == "math")


def test_attention_goes_by_what_the_program_allows():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def allowing(*backends):
        def call():
            with sdpa_kernel(list(backends)):
                attention(grad=False)()

        return ops_of(HOPPER, call)

    assert "_scaled_dot_product_flash_attention" in allowing(SDPBackend.FLASH_ATTENTION)
    assert "_scaled_dot_product_efficient_attention" in allowing(SDPBackend.EFFICIENT_ATTENTION)
    assert "_safe_softmax" in allowing(SDPBackend.MATH)


def test_attention_under_inference_mode_is_chosen_too():
    def call():
        with torch.inference_mode():
            attention(grad=False)()

    assert "_safe_softmax" not in ops_of(AMPERE, call)


@pytest.mark.parametrize(
    ("make", "shape", "dtype", "wanted"),
    [
        (lambda: torch.nn.BatchNorm2d(4), (2, 4, 8, 8), F32, "cudnn_batch_norm"),
        (lambda: torch.nn.BatchNorm2d(4), (2, 4, 8, 8), BF16, "native_batch_norm"),
        (lambda: torch.nn.BatchNorm1d(4), (2, 4), F32, "native_batch_norm"),
        (lambda: torch.nn.BatchNorm2d(4, affine=False), (2, 4, 8, 8), F32, "native_batch_norm"),
        (lambda: torch.nn.LSTM(4, 8), (5, 2, 4), F32, "_cudnn_rnn"),
        (lambda: torch.nn.GRU(4, 8, bidirectional=True), (5, 2, 4), F32, "_cudnn_rnn"),
        (lambda: torch.nn.RMSNorm(8), (2, 8), F32, "_fused_rms_norm"),
        (lambda: torch.nn.Dropout(0.1), (2, 8), F32, "native_dropout"),
    ],
)
def test_layers(make, shape, dtype, wanted):
    def call():
        out = make().to(dtype)(torch.empty(shape, dtype=dtype, requires_grad=True))
        (out[0] if isinstance(out, tuple) else out).sum().backward()

    assert any(wanted == name for name in ops_of(HOPPER, call))


def test_grids_are_sampled_by_cudnn_where_it_can():
    def call(align):
        return lambda: functional.grid_sample(torch.empty(1, 3, 8, 8), torch.empty(1, 4, 4, 2), align_corners=align)

    assert "cudnn_grid_sampler" in ops_of(HOPPER, call(True))
    assert "grid_sampler_2d" in ops_of(HOPPER, call(False))


def test_ops_without_shapes_run_the_kernel_of_the_cpu_on_zeros():
    results = []

    def call():
        results.extend(torch.geqrf(torch.empty(4, 3)))
        bins = torch.histogramdd(torch.empty(6, 2), [2, 2])
        results.extend([bins.hist, *bins.bin_edges])

    ops_of(HOPPER, call)
    shapes = [(4, 3), (3,), (2, 2), (3,), (3,)]
    assert [(t.device.type, tuple(t.shape)) for t in results] == [("cuda", shape) for shape in shapes]
