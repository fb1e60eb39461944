"""Shardwise rules in DTensor: on real ranks, against one device."""

import random
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import shardwise_dtensor
from shardwise.discovery.process import default_registry
from shardwise.errors import NoRuleError, NoStrategyError, RuleError
from shardwise.rule import AbstractMesh, einop, full_mesh_rule, row_major, rule, rule_from
from shardwise.testing import check_rule, mesh
from shardwise_dtensor import torch_private
from shardwise_dtensor.shardings import Shardings

HERE = Path(__file__).parent
KERNELS = str(HERE / "kernels.py")
MESHES = [(4,), (2, 2)]


def made(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# -- in the workers ------------------------------------------------------------------------------------------------


def placed(whole, on, placements):
    """A DTensor with these placements, partial ones made of parts that differ between ranks."""
    local = distribute_tensor(whole, on, [Replicate() if p.is_partial() else p for p in placements]).to_local()
    for mesh_dim, p in enumerate(placements):
        n, at = on.size(mesh_dim), on.get_local_rank(mesh_dim)
        if p.is_partial("sum"):
            local = local * 2 * (at + 1) / (n * (n + 1))
        elif p.is_partial("max"):
            local = local if at == n - 1 else local - 1
    return DTensor.from_local(local, on, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def choices(ndim, partials):
    return [Replicate(), *map(Shard, range(ndim)), *([Partial()] if partials else [])]


def layouts(rng, wholes, mesh_ndim, partials):
    return [[rng.choice(choices(w.ndim, partials)) for _ in range(mesh_ndim)] for w in wholes]


def close(found, expected):
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-4, atol=1e-5)


def norm_everywhere(load, shape, tries, seed):
    """Forward and backward of the norm by DTensor, for operands in random places."""
    kernels = load(KERNELS)
    on, rng = mesh(shape), random.Random(seed)
    wholes = [made(5, 6, 8, seed=1), made(5, 6, 8, seed=2), made(8, seed=3)]
    leaves = [w.clone().requires_grad_() for w in wholes]
    expected = kernels.bridge.gated_norm(*leaves, 1e-5)
    expected.square().sum().backward()
    seen = set()
    with shardwise_dtensor.export([kernels.GATED_NORM, kernels.GATED_NORM_BACKWARD]):
        for _ in range(tries):
            at = layouts(rng, wholes, len(shape), partials=False)
            given = [placed(w, on, p).requires_grad_() for w, p in zip(wholes, at, strict=True)]
            found = kernels.bridge.gated_norm(*given, 1e-5)
            close(found, expected)
            found.full_tensor().square().sum().backward()
            for mine, theirs in zip(given, leaves, strict=True):
                close(mine.grad, theirs.grad)
            at = layouts(rng, wholes, len(shape), partials=True)
            found = kernels.bridge.gated_norm(*(placed(w, on, p) for w, p in zip(wholes, at, strict=True)), 1e-5)
            close(found, expected)
            seen.add(found.placements)
    return len(seen)


@pytest.mark.parametrize("shape", MESHES)
def test_a_custom_op_runs_forward_and_backward(pool, loader, shape):
    assert min(pool.run(norm_everywhere, loader, shape, 12, 7)) > 1


def products(load):
    """One op, called on the same operands with arguments that decide its rows."""
    kernels = load(KERNELS)
    a, b = made(8, 8, seed=1), made(8, 8, seed=2)
    at = [distribute_tensor(t, mesh((4,)), [Shard(1)]) for t in (a, b)]
    forms = [((False,), {}), ((True,), {}), ((False,), {"way": "ba"}), ((True,), {})]
    with shardwise_dtensor.export(kernels.PRODUCT):
        for args, kwargs in forms:
            close(kernels.bridge.product(*at, *args, **kwargs), kernels.bridge.product(a, b, *args, **kwargs))


def test_arguments_that_decide_rows_key_the_choice(pool, loader):
    pool.run(products, loader)


def shares(load, keyed):
    """Whether calls with one flag and the other are both right."""
    kernels = load(KERNELS)
    x = made(8, 8, seed=1)
    at = distribute_tensor(x, mesh((4,)), [Shard(0)])
    varying = torch_private.varying
    if not keyed:
        torch_private.varying = lambda op, by_type: (None, ())
    try:
        with shardwise_dtensor.export(kernels.SHARES):
            found = [kernels.bridge.shares(at, down).full_tensor() for down in (False, True)]
    finally:
        torch_private.varying = varying
    return [torch.allclose(f, x.softmax(d), atol=1e-4) for d, f in zip((1, 0), found, strict=True)]


def test_a_flag_that_does_not_key_the_choice_gives_wrong_numbers(pool, loader):
    # What put_rule is for: register_sharding by itself keys neither by flags nor by words.
    assert pool.run(shares, loader, False) == [[True, False]] * 4
    assert pool.run(shares, loader, True) == [[True, True]] * 4


def other_ops(load):
    """Ops that write, reduce by max, take lists, have lowered or conditional rows; operands in many places."""
    kernels = load(KERNELS)
    rng = random.Random(3)
    x, s, wide = made(6, 8, seed=1), made(6, seed=2), made(8, 8, seed=3)
    with shardwise_dtensor.export(kernels.RULES) as done:
        for shape in MESHES * 4:
            on = mesh(shape)
            (at,) = layouts(rng, [x], len(shape), partials=False)
            mine, whole = placed(x, on, at), x.clone()
            kernels.bridge.scale_rows_(mine, placed(s, on, [Replicate()] * len(shape)))
            kernels.bridge.scale_rows_(whole, s)
            close(mine, whole)
            assert list(mine.placements) == at
            partials = [Partial("max") if rng.random() < 0.5 else p for p in at]
            close(kernels.bridge.column_max(placed(x, on, partials)), x.amax(0))
            parts = [placed(x, on, p) for p in layouts(rng, [x, x], len(shape), partials=True)]
            close(kernels.bridge.total(parts), 2 * x)
            close(kernels.bridge.row_softmax(placed(x, on, at)), x.softmax(-1))
            for width in (2, 4):
                close(kernels.bridge.fold(placed(wide, on, at), width), wide.reshape(8, -1, width))
            whole_numbers = [placed((10 * x).long(), on, at), placed((10 * s).long().unsqueeze(1).expand(6, 8), on, at)]
            assert kernels.bridge.total(whole_numbers).dtype == torch.int64
        return [str(one) for one in done.of("partly")]


def test_ops_of_many_kinds(pool, loader):
    lines = pool.run(other_ops, loader)[0]
    assert any("row_softmax" in line and "row 'shard n' runs a lowering" in line for line in lines)


def overridden(load):
    """A rule in the place of one of DTensor's own, and back."""
    kernels = load(KERNELS)
    seen = []
    a, b = made(8, 8, seed=1), made(8, 8, seed=2)
    given = [distribute_tensor(t, mesh((4,)), [Shard(0)]) for t in (a, b)]
    close(given[0] @ given[1], a @ b)
    with shardwise_dtensor.export(kernels.matrices(seen), override=True):
        close(given[0] @ given[1], a @ b)
        during = len(seen)
    close(given[0] @ given[1], a @ b)
    return during, len(seen)


def test_override_replaces_what_dtensor_has_and_undo_brings_it_back(pool, loader):
    during, after = pool.run(overridden, loader)[0]
    assert during == after == 1


class Block(torch.nn.Module):
    """A few layers whose ops come from many plugins."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = torch.nn.Linear(12, 24), torch.nn.LayerNorm(24), torch.nn.Linear(24, 12)

    def forward(self, x):
        return (self.down(self.norm(torch.nn.functional.gelu(self.up(x)))) + x).softmax(-1)


def trained(shape, tries):
    """A model on DTensors by shardwise's rules in the place of DTensor's own, parameters in random places."""
    torch.manual_seed(0)
    on, rng = mesh(shape), random.Random(1)
    plain, x = Block(), made(10, 12)
    expected = plain(x)
    (expected.square().sum() + expected.amax()).backward()
    plugins = sorted({entry.origin.plugin for entry in default_registry().ops()})
    with ExitStack() as stack:
        done = [stack.enter_context(shardwise_dtensor.export_plugin(name, override=True)) for name in plugins]
        for _ in range(tries):
            model = Block()
            model.load_state_dict(plain.state_dict())
            for module in model.modules():
                for name, value in list(module.named_parameters(recurse=False)):
                    (at,) = layouts(rng, [value], len(shape), partials=False)
                    setattr(module, name, torch.nn.Parameter(distribute_tensor(value.detach(), on, at)))
            found = model(distribute_tensor(x, on, layouts(rng, [x], len(shape), partials=False)[0]))
            close(found, expected)
            (found.square().sum() + found.amax()).backward()
            for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-4)
        return sum(len(one.of("exported")) for one in done), {
            w for one in done for e in one.ops for w in e.rows_left_out
        }


def test_a_model_runs_by_all_rules_that_go_over(pool):
    ops, left_out = pool.run(trained, (2, 2), 3)[0]
    assert ops > 400
    assert "shard k" in left_out  # a lowered row of a product, met on the way


# -- here ------------------------------------------------------------------------------------------------------------


def samples(kernels):
    square = [made(6, 6, seed=i) for i in range(3)]
    return {
        kernels.GATED_NORM: [(made(5, 6, 8), made(5, 6, 8, seed=1), made(8, seed=2), 1e-5)],
        kernels.GATED_NORM_BACKWARD: [(made(5, 6, 8), made(5, 6, 8, seed=1), made(5, 6, 8, seed=3), made(8), 1e-5)],
        kernels.PRODUCT: [(*square[:2], True), (*square[:2], False)],
        kernels.SHARES: [(square[0], True), (square[0], False)],
        kernels.SCALE_ROWS: [(square[0], made(6))],
        kernels.COLUMN_MAX: [(square[0],), (made(9, 6),)],
        kernels.TOTAL: [(square,), (square[:1],)],
        kernels.ROW_SOFTMAX: [(square[0],)],
        kernels.FOLD: [(made(6, 8), 2)],
    }


def test_the_rules_shown_are_right(kernels):
    given = samples(kernels)
    assert set(given) == set(kernels.RULES)
    for one, calls in given.items():
        assert not check_rule(one, [(args, {}) for args in calls], cases=60).unexercised


def test_the_report_says_what_stays_behind_and_why(kernels):
    written_rule = rule_from(torch.ops.aten.relu.default, writes=["self"])(lambda self: None)
    several = [kernels.SWAP, kernels.HALVES, kernels.MASKED, written_rule]
    zipped = rule(torch.ops.aten._foreach_neg.default, {"self": "..."}, zip_lists=True)
    full = full_mesh_rule(torch.ops.aten.relu.default)(lambda mesh, schema: None)
    out = rule(torch.ops.aten.mm.out, "m k, k n -> m n", reduce={"k": "sum"})
    random_rule = rule(torch.ops.aten.rand_like.default, "... -> ...")
    view = rule(torch.ops.aten.view.default, "m n -> m n")
    handled = rule(torch.ops.aten.argmax.default, "m n -> m n")
    with shardwise_dtensor.export(
        [*several, zipped, full, out, random_rule, view, handled, kernels.matrices(), kernels.GATED_NORM]
    ) as done:
        assert [str(one.op) for one in done.of("exported")] == ["bridge.gated_norm.default"]
        refused = {(str(one.op), " ".join(one.refused)) for one in done.of("left out")}
    for op, words in {
        "bridge.swap.default": "it writes x, y",
        "bridge.halves.default": "results that are single tensors",
        "bridge.masked.default": "keyword-only tensors (mask)",
        "aten._foreach_neg.default": "every list position chooses",
        "aten.mm.out": "out= arguments",
        "aten.rand_like.default": "draws random numbers",
        "aten.view.default": "makes its arguments local by itself",
        "aten.argmax.default": "code of its own",
        "aten.mm.default": "pass override=True",
    }.items():
        assert any(op == name and words in why for name, why in refused), op
    reasons = " ".join(why for name, why in refused if name == "aten.relu.default")
    for words in ("without its schema saying so", "function of the full mesh"):
        assert words in reasons


def test_undo_takes_the_op_away_again(kernels):
    op = kernels.bridge.gated_norm.default
    done = shardwise_dtensor.export(kernels.GATED_NORM)
    assert torch_private.has_rule(op)
    again = shardwise_dtensor.export(kernels.GATED_NORM)
    assert "override=True" in str(again)
    done.undo()
    assert not torch_private.has_rule(op)


def test_ops_patterns_and_plugins_come_from_the_registry(kernels):
    undo = default_registry().override(kernels.GATED_NORM)
    try:
        for what in (kernels.bridge.gated_norm.default, "bridge.gated*"):
            with shardwise_dtensor.export(what) as done:
                assert [one.status for one in done.ops] == ["exported"]
    finally:
        undo()
    with pytest.raises(NoRuleError):
        shardwise_dtensor.export(kernels.bridge.gated_norm.default)
    with pytest.raises(RuleError, match=r"no op with a rule has such a name"):
        shardwise_dtensor.export("bridge.nothing*")
    with pytest.raises(RuleError, match=r"it has no rule in force; the loaded plugins are .*shardwise-matmul"):
        shardwise_dtensor.export_plugin("shardwise-nothing")


def test_a_whole_plugin_goes_over_as_far_as_it_can():
    with shardwise_dtensor.export_plugin("shardwise-matmul", override=True) as done:
        assert {"aten.mm.default", "aten.bmm.default"} <= {str(one.op) for one in done.of("exported")}
        assert all(one.refused for one in done.of("left out"))
    untouched = shardwise_dtensor.export_plugin("shardwise-matmul")
    assert "aten.mm.default" in {str(one.op) for one in untouched.of("left out")}
    untouched.undo()


# -- what goes over for one call ---------------------------------------------------------------------------------


def test_a_preview_says_which_rows_go(kernels):
    seen = shardwise_dtensor.preview(kernels.ROW_SOFTMAX, made(6, 8))
    assert seen.rows == ("[R] -> [R]", "[S(0)] -> [S(0)]")
    assert seen.left_out == {"shard n": "runs a lowering, and DTensor would run the plain op"}


def test_a_call_whose_result_lies_otherwise_than_dtensor_notes_stays_behind():
    corrected = rule_from(torch.ops.aten.relu.default, results=row_major)(lambda self: einop("m n -> m n"))
    assert "[S(0)] -> [S(0)]" in shardwise_dtensor.preview(corrected, made(6, 8)).rows
    with pytest.raises(NoStrategyError, match="other strides"):
        shardwise_dtensor.preview(corrected, made(8, 6).t())


def test_rows_with_conditions_go_where_every_choice_of_mesh_dims_keeps_them(kernels):
    def sharded(one, *args, **options):
        rows = shardwise_dtensor.preview(one, *args, **options).rows
        return {row for row in rows if "S(" in row}

    assert "[S(1)] -> [S(1)]" in sharded(kernels.FOLD, made(8, 8), 2, mesh_shape=(2, 2))
    assert "[S(1)] -> [S(1)]" not in sharded(kernels.FOLD, made(8, 8), 4, mesh_shape=(2, 2))
    assert "[S(0)] -> [P(max)]" in sharded(kernels.COLUMN_MAX, made(8, 6))
    # Five rows leave the last of four ranks without any, not so of two times two; three do.
    assert "[S(0)] -> [P(max)]" not in sharded(kernels.COLUMN_MAX, made(5, 6))
    assert "[S(0)] -> [P(max)]" in sharded(kernels.COLUMN_MAX, made(5, 6), mesh_shape=(2, 2))
    assert "[S(0)] -> [P(max)]" not in sharded(kernels.COLUMN_MAX, made(3, 6), mesh_shape=(2, 2))


def test_a_sum_of_integers_is_not_made_of_whole_ones(kernels):
    floats = shardwise_dtensor.preview(kernels.TOTAL, [made(6, 8), made(6, 8)])
    integers = shardwise_dtensor.preview(kernels.TOTAL, [made(6, 8).long(), made(6, 8).long()])
    assert "[P(sum), P(sum)] -> [P(sum)]" in floats.rows
    assert "[P(sum), P(sum)] -> [P(sum)]" not in integers.rows


def test_products_are_not_asked_of_operands():
    any_kind = rule(torch.ops.aten.clone.default, "... -> ...", partial=["* -> *"])
    seen = shardwise_dtensor.preview(any_kind, made(6, 8))
    assert "[P(max)] -> [P(max)]" in seen.rows
    assert "product -> product" not in seen.rows
    assert any("product" in name for name in seen.left_out)


def test_kinds_that_do_not_commute_do_not_meet_on_several_mesh_dims():
    any_kind = rule(torch.ops.aten.clone.default, "... -> ...", partial=["* -> *"])
    flat = {row for row in shardwise_dtensor.preview(any_kind, made(6, 8)).rows if "P(" in row}
    grid = {row for row in shardwise_dtensor.preview(any_kind, made(6, 8), mesh_shape=(2, 2)).rows if "P(" in row}
    assert flat == {f"[P({kind})] -> [P({kind})]" for kind in ("sum", "avg", "max", "min")}
    assert grid == {"[P(sum)] -> [P(sum)]", "[P(avg)] -> [P(avg)]"}


def test_local_arguments_stay_behind():
    local = rule(torch.ops.aten.flip.default, "m n -> m n", local_args=lambda local: {})
    seen = shardwise_dtensor.preview(local, made(6, 8), [0])
    assert seen.rows == ("[R] -> [R]",)


def test_a_number_in_a_tensors_place_stays_a_number():
    product = rule(torch.ops.aten.mul.Tensor, "..., ... -> ...", partial=["sum, R -> sum", "R, sum -> sum"])
    seen = shardwise_dtensor.preview(product, made(6, 8), 2)
    assert set(seen.rows) == {"[R] -> [R]", "[S(0)] -> [S(0)]", "[S(1)] -> [S(1)]", "[P(sum)] -> [P(sum)]"}


def test_symbolic_sizes_are_refused(kernels):
    size = pytest.importorskip("torch.fx.experimental.symbolic_shapes").ShapeEnv().create_unbacked_symint()
    meta = torch_private.TensorMeta(torch.Size([size, 8]), (8, 1), torch.float32)
    given = torch_private.DTensorSpec(torch_private.torch_mesh(AbstractMesh((4,))), (Replicate(),), meta)
    with pytest.raises(NoStrategyError, match=r"dynamic=False"):
        Shardings(kernels.ROW_SOFTMAX.ops[0], kernels.ROW_SOFTMAX)(given)
