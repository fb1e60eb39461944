"""The operators of PyTorch's own database, by family, with their samples."""

from __future__ import annotations

import re
import warnings

import torch
from attrs import frozen

DATABASES = (
    "op_db",
    "foreach_unary_op_db",
    "foreach_binary_op_db",
    "foreach_pointwise_op_db",
    "foreach_reduce_op_db",
    "foreach_other_op_db",
)
FORWARD, BACKWARD, IN_PLACE = DIRECTIONS = ("forward", "backward", "in place")

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16, torch.float16)

FAMILIES = (
    ("foreach", r"_foreach"),
    (
        "linear algebra",
        r"linalg\.|qr|pca|cholesky|lu|geqrf|ormqr|svd|triangular_solve|pinverse|logdet|matrix_exp|trace",
    ),
    ("matrix products", r"(add|b|add?b)?mm$|.*matmul|mv$|addmv|addr|baddbmm|dot|vdot|inner|einsum|cdist|kron|cross"),
    ("matrix products", r"ger|outer|tensordot|addmm|sparse|torch\._scaled|_grouped|block_diag|chain|vecdot|addbmm|__r"),
    ("attention", r".*attention|.*multi_head"),
    ("fft", r"fft\.|stft|istft"),
    ("convolution and pooling", r"nn\.functional\.(conv|.*pool|fold|unfold|interpolate|up|grid|affine|pixel|channel)"),
    ("padding", r".*\.pad|constant_pad|.*circular"),
    ("loss", r"nn\.functional\..*(loss|nll|cross_ent|kl_div|margin|pairwise|cosine)|.*distance"),
    ("norm", r"nn\.functional\.(.*norm)|_?native_(batch|layer)|_batch_norm|norm|renorm|.*local_response"),
    ("embedding", r"nn\.functional\.(embedding|one_hot)"),
    ("softmax", r".*softm(ax|in)|logsumexp|logcumsumexp"),
    ("masked", r"masked"),
    ("random", r".*dropout|bernoulli|cauchy|exponential|geometric|log_normal|multinomial|normal|uniform|rand|poisson"),
    ("windows", r"signal"),
    ("special", r"special|polygamma|mvlgamma"),
    (
        "order",
        r"sort|argsort|topk|kthvalue|median|nanmedian|mode|msort|unique|.*quantile|histc|.*histogram|searchs|bucket",
    ),
    ("cumulative", r"cum|logcum|diff|gradient|trapez"),
    ("indexing", r"index|gather|scatter|take|put|nonzero|argwhere|where|select|slice|narrow|diag|tri|roll|flip|rot90"),
    ("indexing", r"__getitem__|.*_scatter|_unsafe_masked|_segment|isin|repeat|tile|bincount|unravel|as_strided"),
    ("reduction", r"sum|mean|prod|amax|amin|aminmax|max|min|all|any|std|var|count|argm|nan(mean|sum)|norm|std|equal"),
    ("reduction", r"allclose|isclose|item|trapz|sum_to|hash"),
    (
        "creation",
        r"zeros|ones|full|empty|arange|linspace|logspace|eye|new_|scalar_tensor|complex|polar|meshgrid|vander",
    ),
    ("creation", r"from|combinations|cartesian|.*_like|lift|cov|corr"),
    (
        "views",
        r"view|resh|resiz|expand|perm|trans|squeeze|unsq|flat|unfl|(tensor_)?split|_?chunk|cat|stack|.stack|.split",
    ),
    (
        "views",
        r"hsp|unbind|atleast|broadcast|movedim|swap|t$|T|H$|mT|mH|adjoint|ravel|contig|clone|detach|column|concat|block|unfold",
    ),
    ("nn pointwise", r"nn\.functional"),
    ("pointwise", r"."),
)


@frozen
class Entry:
    """One operator of the databases: what it is called here, its family, and torch's record of it."""

    name: str
    family: str
    record: object


def entries(pattern=""):
    """The operators whose name matches, in the order of the databases."""
    from torch.testing._internal import common_methods_invocations as known  # takes seconds

    entries = []
    for database in DATABASES:
        for record in getattr(known, database):
            name = record.name + (f".{record.variant_test_name}" if record.variant_test_name else "")
            if re.search(pattern, name):
                entries.append(Entry(name, family_of(name), record))
    return entries


def family_of(name):
    return next(family for family, pattern in FAMILIES if re.match(pattern, name))


def dtype_of(record, direction, device="cpu"):
    """The first dtype, in a fixed order, that the operator has on the device."""
    have = record.supported_backward_dtypes(device) if direction == BACKWARD else record.supported_dtypes(device)
    return next((dtype for dtype in DTYPES if dtype in have), None)


def has(record, direction):
    """Whether the operator has that direction at all."""
    if direction == IN_PLACE:
        return record.inplace_variant is not None
    return direction == FORWARD or record.supports_autograd


def samples(record, direction, device="cpu", *, limit):
    """Up to ``limit`` samples, the same on every rank: evenly out of all that torch gives."""
    dtype = dtype_of(record, direction, device)
    if dtype is None:
        return []
    torch.manual_seed(0)
    more = {"num_input_tensors": [3]} if record.name.startswith("_foreach") else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = list(record.sample_inputs(device, dtype, requires_grad=direction == BACKWARD, **more))
    return inputs[:: max(1, -(-len(inputs) // limit))]
