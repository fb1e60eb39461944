"""Custom ops that neither DTensor nor shardwise knows, and shardwise rules for them."""

import torch
from torch.library import custom_op

from shardwise.rule import Flow, einop, rule, rule_from

# -- a row-wise norm with a gate: linear in the gate and in the weight, each by itself -------------------------------

custom_op("bridge::gated_norm", mutates_args=(), schema="(Tensor x, Tensor gate, Tensor weight, float eps) -> Tensor")(
    lambda x, gate, weight, eps: x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gate * weight
)


def backward_of_norm(grad, x, gate, weight, eps):
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    normed, inner = x * scale, grad * gate * weight
    dx = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
    return dx, grad * normed * weight, (grad * normed * gate).flatten(0, -2).sum(0)


custom_op(
    "bridge::gated_norm_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor x, Tensor gate, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
)(backward_of_norm)
bridge = torch.ops.bridge

torch.library.register_fake("bridge::gated_norm", lambda x, gate, weight, eps: torch.empty_like(x))
torch.library.register_fake(
    "bridge::gated_norm_backward",
    lambda grad, x, gate, weight, eps: (torch.empty_like(x), torch.empty_like(gate), torch.empty_like(weight)),
)


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])
    ctx.eps = inputs[3]


def gated_norm_grad(ctx, grad):
    return (*bridge.gated_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None)


torch.library.register_autograd("bridge::gated_norm", gated_norm_grad, setup_context=keep)

GATED_NORM = rule(
    bridge.gated_norm.default,
    "b s d, b s d, d -> b s d",
    replicate=["d"],
    partial=["R, sum, R -> sum", "R, R, sum -> sum"],
)
GATED_NORM_BACKWARD = rule(
    bridge.gated_norm_backward.default,
    "b s d, b s d, b s d, d -> b s d, b s d, d",
    reduce={"b": "sum", "s": "sum"},
    replicate=["d"],
    partial=["sum, R, R, R -> sum, sum, sum"],
)


# -- a product whose rows depend on a flag and on a word ------------------------------------------------------------

custom_op("bridge::product", mutates_args=(), schema="(Tensor a, Tensor b, bool turned, *, str way='ab') -> Tensor")(
    lambda a, b, turned, *, way="ab": ((a @ b.T if turned else a @ b) if way == "ab" else (b @ a)).clone()
)
torch.library.register_fake(
    "bridge::product", lambda a, b, turned, *, way="ab": a.new_empty(a.shape[0], b.shape[0 if turned else 1])
)


@rule_from(bridge.product.default)
def PRODUCT(a, b, turned, way):
    """Squares of one size in all forms, so that nothing but the arguments tells the rows apart."""
    text = ("m k, n k -> m n" if turned else "m k, k n -> m n") if way == "ab" else "k n, m k -> m n"
    return einop(text, reduce={"k": "sum"})


custom_op("bridge::shares", mutates_args=(), schema="(Tensor x, bool down) -> Tensor")(
    lambda x, down: x.softmax(0 if down else 1)
)
torch.library.register_fake("bridge::shares", lambda x, down: torch.empty_like(x))
SHARES = rule_from(bridge.shares.default)(lambda x, down: einop("m n -> m n", replicate=["m" if down else "n"]))

# -- in place, reductions, lowerings, conditions --------------------------------------------------------------------

custom_op("bridge::scale_rows_", mutates_args=("x",), schema="(Tensor(a!) x, Tensor s) -> ()")(
    lambda x, s: (x.mul_(s.unsqueeze(-1)), None)[1]
)
torch.library.register_fake("bridge::scale_rows_", lambda x, s: None)
SCALE_ROWS = rule(bridge.scale_rows_.default, {"x": "m n", "s": "m"}, partial=["sum, R ->"])

custom_op("bridge::column_max", mutates_args=(), schema="(Tensor x) -> Tensor")(lambda x: x.amax(0))
torch.library.register_fake("bridge::column_max", lambda x: x.new_empty(x.shape[1]))
COLUMN_MAX = rule(bridge.column_max.default, "m n -> n", reduce={"m": "max"}, partial=["max -> max"], nonempty=["m"])

custom_op("bridge::total", mutates_args=(), schema="(Tensor[] parts) -> Tensor")(
    lambda parts: sum(parts[1:], parts[0].clone())
)
torch.library.register_fake("bridge::total", lambda parts: torch.empty_like(parts[0]))


@rule_from(bridge.total.default)
def TOTAL(parts):
    """All parts have the same placements; sums may be partial."""
    return einop(", ".join(["m n"] * len(parts)) + " -> m n", partial=["sum, ... -> sum"])


custom_op("bridge::row_softmax", mutates_args=(), schema="(Tensor x) -> Tensor")(lambda x: x.softmax(-1))
torch.library.register_fake("bridge::row_softmax", torch.empty_like)


def softmax_over_ranks(local, x):
    dims = local.sharding(local.inputs[0], -1)
    if not dims:
        return x.softmax(-1)
    empty = x.new_full((*x.shape[:-1], 1), float("-inf"))
    top = local.comm.all_reduce(torch.cat([x, empty], -1).amax(-1, keepdim=True), "max", dims)
    raised = (x - top).exp()
    return raised / local.comm.all_reduce(raised.sum(-1, keepdim=True), "sum", dims)


ROW_SOFTMAX = rule(bridge.row_softmax.default, "m n -> m n", lowering={"n": softmax_over_ranks})

custom_op("bridge::fold", mutates_args=(), schema="(Tensor x, int width) -> Tensor")(
    lambda x, width: x.reshape(x.shape[0], x.shape[1] // width, width).clone()
)
torch.library.register_fake("bridge::fold", lambda x, width: x.new_empty(x.shape[0], x.shape[1] // width, width))


@rule_from(bridge.fold.default)
def FOLD(x, width):
    """Whole heads may go to different ranks; the pieces must number a divisor of the heads."""
    heads_then_rest = (("h", x.shape[1] // width), ("d", width))
    return Flow([["s", heads_then_rest]], [["s", "h", "d"]])


# -- one of DTensor's own ------------------------------------------------------------------------------------------


def matrices(seen=None):
    """A rule for an op that DTensor has; ``seen`` grows when it is asked."""

    @rule_from(torch.ops.aten.mm.default)
    def MM(self, mat2):
        if seen is not None:
            seen.append(self.shape)
        return einop("m k, k n -> m n", reduce={"k": "sum"})

    return MM


# -- ops that cannot go over ------------------------------------------------------------------------------------------

custom_op("bridge::swap", mutates_args=("x", "y"), schema="(Tensor(a!) x, Tensor(b!) y) -> ()")(lambda x, y: None)
custom_op("bridge::halves", mutates_args=(), schema="(Tensor x) -> Tensor[]")(lambda x: [x / 2, x / 2])
torch.library.define("bridge::masked", "(Tensor x, *, Tensor mask) -> Tensor")
SWAP = rule(bridge.swap.default, {"x y": "m n"})
HALVES = rule_from(bridge.halves.default)(lambda x: einop("m n -> m n, m n"))
MASKED = rule(bridge.masked.default, {"x mask": "m n", "->": "m n"})
RULES = (GATED_NORM, GATED_NORM_BACKWARD, PRODUCT, SHARES, SCALE_ROWS, COLUMN_MAX, TOTAL, ROW_SOFTMAX, FOLD)
