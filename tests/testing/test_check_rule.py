"""The oracle accepts right rules and refuses each kind of wrong one, naming the row."""

import pytest
import torch

from shardwise.errors import NoStrategyError
from shardwise.kernel.placements import REPLICATE, partial, shard
from shardwise.kernel.rule import Row, Rows
from shardwise.kernel.schema import OpStrategy, PlacementStrategy
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.strategies import result_metas, strategy
from shardwise.rule.authoring import full_mesh_rule, like, rule, rule_from
from shardwise.rule.flow import Flow
from shardwise.testing.oracle import check_rule
from shardwise.testing.report import RuleRefuted
from shardwise.testing.values import made

aten = torch.ops.aten

MATRICES = [((made((8, 4)), made((4, 6), seed=1)), {}), ((made((5, 7)), made((7, 3), seed=1)), {})]
ONE = [((made((8, 6)),), {}), ((made((5, 7)),), {}), ((made((2, 3)),), {})]
PAIR = [((made((8, 6)), made((8, 6), seed=1)), {}), ((made((5, 7)), made((5, 7), seed=1)), {})]
TABLE = [((made((7, 3)), torch.tensor([[0, 6, 3], [2, 2, 5]])), {}), ((made((8, 2)), torch.tensor([7, 0, 4])), {})]
DIM_0 = [((made((8, 6)), [0]), {}), ((made((5, 7)), [0]), {})]


# -- right rules -------------------------------------------------------------------------------------------------


def masked_lookup(local, weight, indices, *_):
    """Each rank answers for its own rows of the table; the rest is -0.0, which changes no sum."""
    start = local.offset(local.spec("weight"))[0]
    mine = (indices >= start) & (indices < start + weight.shape[0])
    if weight.shape[0] == 0:
        return weight.new_full((*indices.shape, weight.shape[1]), -0.0)
    rows = weight[torch.where(mine, indices - start, 0)]
    return rows.where(mine.unsqueeze(-1), -0.0)


def reduced_equal(local, x, y):
    dims = local.sharding(local.spec("self"))
    same = torch.tensor(torch.equal(x, y))
    return bool(local.comm.all_reduce(same, "min", dims)) if dims else bool(same)


@rule_from(aten.view.default, local_args=lambda local: {"size": local.local_shape(local.outputs[0])})
def VIEW(x, size):
    """The leading dim stays, the others are merged."""
    return Flow([("a", *(None for _ in x.shape[1:]))], [("a", None)], partial=["* -> *"])


@rule_from(aten.embedding.default, lowering=masked_lookup)
def EMBEDDING(weight, indices):
    """Rows of the table by masked look-up."""
    names = tuple(f"i{d}" for d in range(indices.ndim))
    return Flow([("v", "e"), names], [(*names, "e")], reduce={"v": "sum"}, lowered={"v"})


GOOD = {
    "matmul": (
        rule(aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"}, partial=["sum, R -> sum", "R, avg -> avg"]),
        MATRICES,
    ),
    "pointwise": (
        rule([aten.add.Tensor, aten.add_.Tensor, aten.add.out], "..., ... -> ...", partial=["sum, sum -> sum"]),
        None,
    ),
    "monotone": (rule(aten.exp.default, "...->...", partial=["max -> max", "min -> min"]), None),
    "every kind": (rule(aten.t.default, "a b -> b a", partial=["* -> *"]), ONE),
    "view": (VIEW, [((made((8, 2, 3)), [8, 6]), {}), ((made((5, 2, 1)), [5, 2]), {})]),
    "embedding": (EMBEDDING, TABLE),
    "communicating": (
        rule(aten.equal.default, "..., ... ->", lowering=reduced_equal),
        [*PAIR, *[((a[0], a[0]), {}) for a, _ in PAIR]],
    ),
    "zipped": (
        rule(aten._foreach_add.List, "..., ... -> ...", zip_lists=True, partial=["sum, sum -> sum"]),
        [(([made((8, 6)), made((5,))], [made((8, 6), seed=1), made((5,), seed=1)]), {})],
    ),
}


# Three overloads with samples of PyTorch's database: what the others take, with more cases.
LONG = {"pointwise": [pytest.mark.slow, pytest.mark.sample]}


@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG.get(name, ())) for name in GOOD])
def test_a_right_rule_is_accepted_and_every_row_runs(name):
    report = check_rule(*GOOD[name])
    assert report.rules == 1
    assert report.ops == len(GOOD[name][0].ops)
    assert report.cases > report.rows > 1
    assert report.unexercised == report.unsampled == report.refuted == ()


# -- wrong rules -------------------------------------------------------------------------------------------------


def rows_rule(op, *rows, lowering=None, static=()):
    """A rule with these rows whatever the call."""

    @rule_from(op, lowering=lowering, static=static)
    def planted(call):
        return Rows(rows)

    return planted


def row(text, inputs, outputs, lowered=False):
    return Row(tuple(inputs), tuple(outputs), text, lowered)


def wrong_offset(local, weight, indices, *_):
    start = local.offset(local.spec("weight"))[0] + 1
    mine = (indices >= start) & (indices < start + weight.shape[0])
    return (
        weight.new_zeros((*indices.shape, weight.shape[1]))
        if not len(weight)
        else (weight[torch.where(mine, indices - start, 0)] * mine.unsqueeze(-1))
    )


def first_mesh_dim_offset(local, weight, indices, *_):
    """Right on a 1-D mesh only: it takes the place on mesh dim 0 for the place of the shard."""
    size = local.spec("weight").shape[0]
    start = min(size, local.coordinate[0] * -(-size // local.spec("weight").mesh_shape[0]))
    mine = (indices >= start) & (indices < start + weight.shape[0])
    return (
        weight.new_zeros((*indices.shape, weight.shape[1]))
        if not len(weight)
        else (weight[torch.where(mine, indices - start, 0)] * mine.unsqueeze(-1))
    )


def embedding_rule(lowering):
    @rule_from(aten.embedding.default, lowering=lowering)
    def planted(weight, indices):
        names = tuple(f"i{d}" for d in range(indices.ndim))
        return Flow([("v", "e"), names], [(*names, "e")], reduce={"v": "sum"}, lowered={"v"})

    return planted


def softmax_whole(local, x, dim, half):
    return torch.softmax(x, dim)


def some_ranks_only(local, x, y):
    same = torch.tensor(torch.equal(x, y))
    return bool(local.comm.all_reduce(same, "min", (0,))) if local.coordinate[0] == 0 else bool(same)


def adds_out_of_place(local, x, y, *, alpha):
    return x + alpha * y


def adds_in_place(local, x, y, *, alpha):
    return x.add_(y, alpha=alpha)


def forgets_out(local, x, *, out):
    return torch.exp(x)


def transposes_a_copy(local, x):
    return x.t().clone()


def sums_in_double(local, x, *, dtype):
    return x.double().sum()


def loses_the_sign_of_zero(local, x):
    return x.neg() + 0.0


def turns_infinity_into_nan(local, x):
    return torch.where(x.isinf(), float("nan"), x.neg())


def turns_nan_into_infinity(local, weight, indices, *_):
    return masked_lookup(local, weight, indices).nan_to_num(nan=float("inf"))


def convolves_nan_into_infinity(local, *operands):
    result = torch.ops.aten.convolution(*operands)
    return torch.where(result.isnan(), float("inf"), result)


def varies_infinitely(local, x, dim, **options):
    variance, mean = torch.ops.aten.var_mean.correction(x, dim, **options)
    return torch.where(variance.isnan(), float("inf"), variance), mean


def wrong_in_small_elements(local, x):
    return torch.where(x.abs() < 0.5, x.neg() * (1 + 1e-6), x.neg())


def sums_with_a_small_error(local, x, dims, *_, **__):
    total = x.sum(dims)
    return torch.where(total.abs() < 1, total * (1 + 1e-5), total)


def fills_with_plus_zero(local, weight, indices, *_):
    return torch.where(masked_lookup(local, weight, indices) == 0, 0.0, masked_lookup(local, weight, indices))


def raises(local, x):
    raise KeyError("no such thing")


@rule_from(aten.view.default)
def GLOBAL_SIZE(x, size):
    """The local view is asked for the global shape."""
    return Flow([("a", *(None for _ in x.shape[1:]))], [("a", None)])


@rule_from(aten.slice.Tensor)
def CUT(x):
    """Every dim, the cut one too."""
    return like(x)


@rule_from(aten.relu.default)
def BROKEN(x):
    """Reads a dim that is not there."""
    return like(x, whole={x.shape[7]})


@full_mesh_rule(aten.mm.default)
def WRONG_FULL(mesh, schema):
    lhs, rhs = schema.specs
    meta = TensorMeta.contiguous((lhs.shape[0], rhs.shape[1]), lhs.dtype)
    by_row = [shard(0), *[REPLICATE] * (mesh.ndim - 1)]
    return OpStrategy(
        (
            PlacementStrategy(
                (lhs.with_placements(by_row), rhs),
                (TensorSpec(mesh, [REPLICATE] * mesh.ndim, meta),),
                (),
                ("rows kept",),
            ),
        )
    )


S0, S1, S2, R, SUM = shard(0), shard(1), shard(2), REPLICATE, partial("sum")
SPECIAL = torch.tensor([[-0.0, 0.0, float("inf")], [-float("inf"), float("nan"), 1.0]])
NEGATED = [((SPECIAL,), {})]
SIGNED_TABLE = [((torch.full((7, 3), -0.0), torch.tensor([[0, 6, 3], [2, 2, 5]])), {})]
NAN_TABLE = [((torch.full((7, 3), float("nan")), torch.tensor([[0, 6, 3], [2, 2, 5]])), {})]
QKV = [((made((2, 4, 8, 4)), made((2, 4, 8, 4), seed=1), made((2, 4, 8, 4), seed=2), 0.0, True), {})]
PADDED = [
    ((made((4, 3, 5)), made((2, 3, 2), seed=1), made((2,), seed=2), [1], [1], [1], False, [0], 1), {}),
]

# What is wrong -> the rule, its samples, the row that must be named.
WRONG = {
    "reduction of a contraction": (
        rule(aten.mm.default, "m k, k n -> m n", reduce={"k": "avg"}),
        MATRICES,
        "shard k",
    ),
    "two partial operands of a product": (
        rule(aten.mm.default, "m k, k n -> m n", reduce={"k": "sum"}, partial=["sum, sum -> sum"]),
        MATRICES,
        "sum, sum -> sum",
    ),
    "mean of means over uneven shards": (
        rows_rule(aten.mean.dim, row("shard d0", [S0], [partial("avg")])),
        DIM_0,
        "shard d0",
    ),
    "bias added once per rank": (
        rule(aten.addmm.default, "n, m k, k n -> m n", reduce={"k": "sum"}),
        [((made((6,)), made((8, 4)), made((4, 6), seed=1)), {})],
        "shard k",
    ),
    "softmax along a sharded dim": (
        rule(aten._softmax.default, "... d -> ... d"),
        [((made((8, 6)), 1, False), {})],
        "shard d",
    ),
    "partial sum through relu": (rule(aten.relu.default, "...->...", partial=["sum -> sum"]), None, "sum -> sum"),
    "partial sum through sqrt": (rule(aten.sqrt.default, "...->...", partial=["sum -> sum"]), None, "sum -> sum"),
    "partial max through sqrt": (rule(aten.sqrt.default, "...->...", partial=["max -> max"]), None, "max -> max"),
    "partial max through a negative factor": (
        rule(aten.mul.Tensor, "..., ... -> ...", partial=["max, R -> max"]),
        None,
        "max, R -> max",
    ),
    "partial sum plus a whole tensor": (
        rule(aten.add.Tensor, "..., ... -> ...", partial=["sum, R -> sum"]),
        None,
        "sum, R -> sum",
    ),
    "partial product through add": (
        rule(aten.add.Tensor, "..., ... -> ...", partial=["product, product -> product"]),
        None,
        "product, product -> product",
    ),
    "partial max negated": (rule(aten.neg.default, "...->...", partial=["max -> max"]), None, "max -> max"),
    "partial sum cut to integers": (
        rule(aten.trunc.default, "...->...", partial=["sum -> sum"]),
        None,
        "sum -> sum",
    ),
    "dims of a transpose left as they were": (rule(aten.t.default, "a b -> a b"), ONE, "shard a"),
    "a broadcast operand sharded": (
        rows_rule(aten.add.Tensor, row("both", [S0, S0], [S0])),
        [((made((8, 6)), made((1, 6), seed=1)), {})],
        "both",
    ),
    "a cut dim sharded": (CUT, [((made((8, 6)), 0, 2, 7, 1), {})], "shard d0"),
    "a masked look-up at the wrong offset": (embedding_rule(wrong_offset), TABLE, "shard v"),
    "a lowering that is right on one mesh dim only": (
        embedding_rule(first_mesh_dim_offset),
        TABLE,
        "shard v | shard v",
    ),
    "a missing lowering": (embedding_rule(None), TABLE, "shard v"),
    "a missing collective": (rows_rule(aten.sum.dim_IntList, row("shard d0", [S0], [R])), DIM_0, "shard d0"),
    "a local answer for the whole tensor": (
        rows_rule(aten.equal.default, row("shard d0", [S0, S0], [])),
        [((made((8, 6)), made((8, 6)).index_fill(0, torch.tensor([7]), 0)), {})],
        "shard d0",
    ),
    "a collective on some ranks only": (
        rows_rule(aten.equal.default, row("shard d0", [S0, S0], [], lowered=True), lowering=some_ranks_only),
        PAIR,
        "shard d0",
    ),
    "a view of the global shape": (GLOBAL_SIZE, [((made((8, 2, 3)), [8, 6]), {})], "shard a"),
    "a copy where the op gives a view": (
        rule(aten.t.default, "a b -> b a", lowering=transposes_a_copy),
        ONE,
        "shard a",
    ),
    "an in-place op that does not write": (
        rule(aten.add_.Tensor, "..., ... -> ...", lowering=adds_out_of_place),
        PAIR,
        "shard",
    ),
    "an in-place op that keeps a wrong kind": (
        rule(aten.mul_.Tensor, "..., ... -> ...", partial=["sum, sum -> sum"]),
        PAIR,
        "sum, sum -> sum",
    ),
    "an operand changed": (rule(aten.add.Tensor, "..., ... -> ...", lowering=adds_in_place), PAIR, "shard"),
    "out= not written": (rule(aten.exp.out, "... -> ...", lowering=forgets_out), None, "shard"),
    "a wrong dtype": (
        rows_rule(aten.sum.default, row("whole", [R], [R], lowered=True), lowering=sums_in_double),
        ONE,
        "whole",
    ),
    "causal attention with a sharded query sequence": (
        rows_rule(aten._scaled_dot_product_flash_attention_for_cpu.default, row("query", [S2, R, R, None], [S2, S2])),
        QKV,
        "query",
    ),
    "key sequence sharded": (
        rows_rule(aten._scaled_dot_product_flash_attention_for_cpu.default, row("keys", [R, S2, S2, None], [SUM, R])),
        QKV,
        "keys",
    ),
    "a random op that draws per shard": (
        rule(aten.bernoulli.p, "... -> ..."),
        [((made((8, 6)), 0.5), {})],
        "shard",
    ),
    "an empty shard that the op refuses": (
        rows_rule(aten.amax.default, row("shard d0", [S0], [partial("max")])),
        DIM_0,
        "shard d0",
    ),
    "norms added up": (
        rule(aten._foreach_norm.Scalar, {"self": "d", "->": "()"}, reduce={"d": "sum"}, zip_lists=True),
        [(([made((8,)), made((5,))],), {})],
        "shard d",
    ),
    "a sign of zero lost": (rule(aten.neg.default, "...->...", lowering=loses_the_sign_of_zero), NEGATED, "shard"),
    "infinity turned into NaN": (
        rule(aten.neg.default, "...->...", lowering=turns_infinity_into_nan),
        NEGATED,
        "shard",
    ),
    "NaN turned into infinity in a partial sum": (embedding_rule(turns_nan_into_infinity), NAN_TABLE, "shard v"),
    "NaN turned into infinity in a convolution": (
        rows_rule(
            aten.convolution.default,
            row("shard n", [S0, REPLICATE, REPLICATE], [S0], lowered=True),
            lowering=convolves_nan_into_infinity,
        ),
        PADDED,
        "shard n",
    ),
    "NaN turned into infinity in a variance": (
        rows_rule(aten.var_mean.correction, row("shard d0", [S0], [S0, S0], lowered=True), lowering=varies_infinitely),
        [((made((8, 6)), [1]), {"correction": 1})],
        "shard d0",
    ),
    "the weights of lerp in parts on both sides of its branch": (
        rule(aten.lerp.Tensor, "..., ..., ... -> ...", affine=("self", "weight")),
        [((torch.full((9,), float("inf")), made((9,)), torch.linspace(0.1, 0.9, 9)), {})],
        "R, R, avg -> avg",
    ),
    "wrong by one in a million in a small element": (
        rule(aten.neg.default, "...->...", lowering=wrong_in_small_elements),
        ONE,
        "shard",
    ),
    "wrong by one in 100,000 in a small sum": (
        rows_rule(aten.sum.dim_IntList, row("shard d1", [S1], [S0], lowered=True), lowering=sums_with_a_small_error),
        DIM_0,
        "shard d1",
    ),
    "zeros of the wrong sign in a masked look-up": (embedding_rule(fills_with_plus_zero), SIGNED_TABLE, "shard v"),
    "a lowering that raises": (rule(aten.relu.default, "...->...", lowering=raises), ONE, "shard"),
    "a full-mesh strategy": (WRONG_FULL, MATRICES, "rows kept"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_refused_and_its_row_named(what):
    wrong, samples, name = WRONG[what]
    with pytest.raises(RuleRefuted) as refused:
        check_rule(wrong, samples)
    message = str(refused.value)
    assert name in " | ".join(refused.value.rows)
    assert " | ".join(refused.value.rows) in message
    assert str(wrong.ops[0]) in message
    assert wrong.source in message
    assert __file__.rpartition("/")[2] in message


def test_a_rule_that_raises_is_refused():
    with pytest.raises(RuleRefuted, match="its function raised IndexError"):
        check_rule(BROKEN, ONE)


def test_results_that_the_op_does_not_give_are_refused():
    def doubled(call, _):
        return [TensorMeta.contiguous(call.outputs[0].shape, torch.float64)]

    @rule_from(aten.relu.default, results=doubled)
    def planted(x):
        return like(x)

    with pytest.raises(RuleRefuted, match=r"on the meta device its results are .*float64.*, on data .*float32"):
        check_rule(planted, ONE)


def test_a_row_of_the_wrong_length_is_refused():
    with pytest.raises(RuleRefuted, match="has 1 placement for 2 operands"):
        check_rule(rows_rule(aten.mm.default, row("short", [S0], [S0])), MATRICES)


def test_float8_is_compared():
    sample = [((made((8, 6)).to(torch.float8_e4m3fn),), {})]
    assert check_rule(rule(aten.clone.default, "a b -> a b"), sample).cases
    wrong = rule(aten.clone.default, "a b -> a b", lowering=lambda _, x, **__: torch.zeros_like(x))
    with pytest.raises(RuleRefuted, match="shard a"):
        check_rule(wrong, sample)


# -- the meta device ---------------------------------------------------------------------------------------------

SCALED = (made((4, 5)).to(torch.float8_e4m3fn), made((5, 3)).to(torch.float8_e4m3fn), torch.ones(()), torch.ones(()))


def scaled(**options):
    """Rows of a product that runs on CPU in any size, and on the meta device in multiples of 16 only."""

    @rule_from(aten._scaled_mm.default, **options)
    def made_rule(call):
        """Named dims m k, k n -> m n."""
        return Flow([("m", None), (None, "n"), None, None, None, None], [("m", "n")])

    return made_rule


def test_a_rule_may_bring_its_own_meta_function():
    def product(a, b, *_, **__):
        return a.new_empty((a.shape[0], b.shape[1]))

    sample = [(SCALED, {"out_dtype": torch.float32})]
    with pytest.raises(RuleRefuted, match="on the meta device it raises"):
        check_rule(scaled(), sample)
    with pytest.raises(RuleRefuted, match=r"on the meta device its results are .*float8"):
        check_rule(scaled(meta=product), sample)
    assert check_rule(scaled(meta=lambda *args, **_: product(*args).to(torch.float32)), sample).cases


# -- what it reports ---------------------------------------------------------------------------------------------


def test_a_row_that_never_applies_is_listed():
    listed = rows_rule(
        aten.relu.default,
        Row((S0,), (S0,), "never", divides=((0, 0, 1),)),
        row("R", [R], [R]),
    )
    assert check_rule(listed, ONE).unexercised == ("aten.relu.default: never",)


def test_a_row_that_an_in_place_form_cannot_take_is_for_the_other_forms():
    def unexercised(*ops):
        @rule_from(ops)
        def times(x, y):
            return Rows((row("by a sum", [REPLICATE, partial("sum")], [partial("sum")]),))

        return check_rule(times, [((made((4, 3)), made((4, 3), seed=1)), {})]).unexercised

    assert unexercised(aten.mul.Tensor, aten.mul_.Tensor) == ()
    assert unexercised(aten.mul_.Tensor) == ("aten.mul_.Tensor: by a sum",)


def test_an_op_without_a_legal_sample_is_listed():
    report = check_rule(rule(aten.mm.default, "m k, k n -> m n", replicate="k"), [((made((2, 3)), made((2, 3))), {})])
    assert report.unsampled == ("aten.mm.default",)
    assert report.cases == 0


def test_keep_going_collects_each_wrong_row_once():
    wrong = rule(aten.relu.default, "...->...", partial=["sum -> sum", "product -> product"])
    report = check_rule(wrong, ONE, meshes=[(4,)], keep_going=True)
    assert [r.rows for r in report.refuted] == [("sum -> sum",), ("product -> product",)]
    assert "2 refuted" in str(report)


def test_a_limit_of_cases_still_runs_every_row():
    matmul = GOOD["matmul"][0]
    everything = check_rule(matmul, MATRICES, strided=False)
    few = check_rule(matmul, MATRICES, cases=12)
    assert few.cases == 12 < everything.cases
    assert few.rows == everything.rows


def test_the_choice_of_cases_is_the_same_every_time():
    wrong = rule(aten.add.Tensor, "..., ... -> ...", partial=["sum, R -> sum", "max, max -> max"])
    messages = {str(check_rule(wrong, PAIR, cases=30, keep_going=True).refuted) for _ in range(2)}
    assert len(messages) == 1


def test_a_stand_in_runs_in_place_of_the_op():
    calls = []

    def stand_in(x, y):
        calls.append(x.shape)
        return x @ y

    report = check_rule(GOOD["matmul"][0], MATRICES, meshes=[(4,)], stand_ins={aten.mm.default: stand_in})
    # The judge may call it more often, to measure what rounding does.
    assert len(MATRICES) + 4 * report.cases <= len(calls)


def test_the_report_is_a_table():
    table = check_rule(*GOOD["matmul"], cases=10).table()
    assert table.row_count == 8


# -- functions of the full mesh ------------------------------------------------------------------------------------


def follows(*kinds):
    """A rule for relu that leaves its operand where it is, if it is partial in one of these kinds or not at all."""

    @full_mesh_rule(aten.relu.default)
    def FOLLOWS(mesh, schema):
        (x,) = schema.specs
        if not set(x.reductions.values()) <= set(kinds):
            raise NoStrategyError(asked="run it", found="it may not lie so", do="Move it.")
        return OpStrategy((strategy(schema, [x.placements], [x.placements], result_metas(schema)),))

    return FOLLOWS


def test_a_function_that_follows_its_operands_is_judged_where_they_lie():
    report = check_rule(follows("max", "min"), ONE, meshes=[(4,), (2, 2)])
    assert report.cases > 20
    assert report.left > 0
    with pytest.raises(RuleRefuted) as refuted:
        check_rule(follows("sum"), ONE, meshes=[(4,)])
    assert refuted.value.placements == "[P(sum)] -> [P(sum)]"


def test_a_function_without_an_answer_for_whole_operands_is_refuted():
    @full_mesh_rule(aten.relu.default)
    def NONE(mesh, schema):
        raise NoStrategyError(asked="run it", found="it may not lie so", do="Move it.")

    with pytest.raises(RuleRefuted, match=r"the rule raises NoStrategyError"):
        check_rule(NONE, ONE, meshes=[(4,)])


def test_a_strategy_that_moves_what_the_op_writes_is_no_case():
    @full_mesh_rule(aten.relu_.default)
    def MOVES(mesh, schema):
        (x,) = schema.specs
        metas = result_metas(schema)
        split = [shard(0)] * mesh.ndim
        both = {x.placements: None, tuple(split): None}
        return OpStrategy(tuple(strategy(schema, [p], [p], metas) for p in both if not any(q.is_partial() for q in p)))

    assert check_rule(MOVES, ONE, meshes=[(4,)]).cases > 0


# -- arguments that an op takes as whole numbers --------------------------------------------------------------------


def one_degree_less(local, x, n):
    """Wrong from the third degree on."""
    n = torch.as_tensor(n, dtype=x.dtype)
    return torch.special.hermite_polynomial_h(x, torch.where((n >= 3) & (n < 100), n - 1, n))


@pytest.mark.parametrize(("overload", "degree"), [("default", made((5, 7), seed=1)), ("n_scalar", 2)])
def test_polynomials_are_judged_at_degrees_that_show_them(overload, degree):
    """A degree that is moved by a rounding is another degree: that is no rounding of the result."""
    op, calls = getattr(aten.special_hermite_polynomial_h, overload), [((made((5, 7)), degree), {})]
    places = [shard(0)] * (2 if overload == "default" else 1)
    check_rule(rows_rule(op, row("rows", places, [shard(0)])), calls)
    wrong = rows_rule(op, row("rows", places, [shard(0)], lowered=True), lowering=one_degree_less)
    with pytest.raises(RuleRefuted, match=r"special_hermite_polynomial_h"):
        check_rule(wrong, calls)
