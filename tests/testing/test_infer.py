"""Rule inference: what it finds is what rules written by hand say, and what only seems to hold is not found."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardwise.discovery.process import default_registry
from shardwise.kernel.placements import Partial, show_all
from shardwise.kernel.signature import op_name
from shardwise.rule.authoring import rule
from shardwise.testing import InferenceError, check_rule, infer
from shardwise.testing.inference import rule_rows
from shardwise.testing.inference.draws import draw
from shardwise.testing.inference.verdicts import call_of
from shardwise.testing.oracle import quietly
from shardwise.testing.values import made

aten = torch.ops.aten


def t(*shape):
    return made(shape, seed=sum(shape))


def indices(high, *shape):
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(0))


# -- ops that nobody can look into -------------------------------------------------------------------------------


@torch.library.custom_op("acme_infer::gate", mutates_args=())
def gate(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(x @ w)


@torch.library.custom_op("acme_infer::norm", mutates_args=())
def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, bias)


@torch.library.custom_op("acme_infer::even", mutates_args=())
def even(x: Tensor) -> Tensor:
    # A mean of means is the mean where all shards are of one size.
    return x.mean(0)


@torch.library.custom_op("acme_infer::by_fours", mutates_args=())
def by_fours(x: Tensor) -> Tensor:
    return x.reshape(-1, 4, x.shape[1]).cumsum(1).reshape(x.shape)


@torch.library.custom_op("acme_infer::below_zero", mutates_args=())
def below_zero(x: Tensor, y: Tensor) -> Tensor:
    return x + y.clamp(max=0).sum(0)


@torch.library.custom_op("acme_infer::limited", mutates_args=())
def limited(x: Tensor) -> Tensor:
    return x.clamp(-20, 20)


@torch.library.custom_op("acme_infer::counts", mutates_args=())
def counts(x: Tensor) -> Tensor:
    counts.calls = getattr(counts, "calls", 0) + 1
    return x + counts.calls


@torch.library.custom_op("acme_infer::add_into", mutates_args=("x",))
def add_into(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("acme_infer::leak", mutates_args=())
def leak(x: Tensor, slope: float) -> Tensor:
    return torch.nn.functional.leaky_relu(x, slope)


@leak.register_fake
def _(x, slope):
    return torch.empty_like(x)


@torch.library.custom_op("acme_infer::contract", mutates_args=())
def contract(x: Tensor, y: Tensor, equation: str) -> Tensor:
    return torch.einsum(equation, x, y).clone()


@contract.register_fake
def _(x, y, equation):
    return torch.einsum(equation, x, y)


def op_of(custom):
    return getattr(torch.ops.acme_infer, custom._name).default


def rows_of(found, verdict="all samples"):
    return {str(f) for f in found.findings if f.verdict == verdict}


# -- against rules written by hand -------------------------------------------------------------------------------

X, XY, X_LAST = ((t(8, 7),), {}), ((t(8, 5), t(8, 5) + 1), {}), ((t(8, 5), t(5)), {})
KNOWN = {
    aten.mm.default: [((t(8, 5), t(5, 4)), {}), ((t(5, 7), t(7, 3)), {})],
    aten.mm.out: [((t(8, 5), t(5, 4)), {"out": torch.empty(8, 4)})],
    aten.bmm.default: [((t(4, 8, 5), t(4, 5, 7)), {})],
    aten.addmm.default: [((t(8, 7), t(8, 5), t(5, 7)), {})],
    aten.relu.default: [X],
    aten.neg.default: [X, ((t(5, 4, 8),), {})],
    aten.exp.default: [X],
    aten.add.Tensor: [XY, X_LAST],
    aten.add_.Tensor: [XY],
    aten.mul.Tensor: [XY, X_LAST],
    aten._softmax.default: [((t(8, 7), 1, False), {}), ((t(8, 7), 0, False), {})],
    aten.sum.dim_IntList: [((t(8, 7), [1]), {}), ((t(8, 7, 5), [0, 2], True), {})],
    aten.amax.default: [((t(8, 7), [1]), {}), ((t(8, 7), [0], True), {})],
    aten.cumsum.default: [((t(8, 7), 1), {}), ((t(8, 7), -2), {})],
    aten.transpose.int: [((t(8, 7, 5), 0, 1), {}), ((t(8, 7, 5), 1, -1), {})],
    aten.embedding.default: [((t(9, 7), indices(9, 8, 5)), {}), ((t(9, 7), indices(9, 8)), {})],
    aten.native_layer_norm.default: [((t(8, 7), [7], t(7), None, 1e-5), {})],
    aten.where.self: [((t(8, 5) > 0, t(8, 5), t(8, 5) + 1), {})],
    aten.gather.default: [((t(8, 7), 1, indices(7, 8, 5)), {})],
    aten.cat.default: [(([t(8, 5), t(4, 5)], 0), {})],
}


@cache
def known(op):
    return infer(op, KNOWN[op])


# The sample has those whose rows are of the same kinds as those of others.
SAMPLE = {
    aten.addmm.default,
    aten.bmm.default,
    aten.mm.out,
    aten.neg.default,
    aten.exp.default,
    aten.mul.Tensor,
    aten.add_.Tensor,
}
OPS = [pytest.param(op, marks=[pytest.mark.slow, pytest.mark.sample] if op in SAMPLE else []) for op in KNOWN]


@pytest.mark.parametrize("op", OPS, ids=op_name)
def test_it_finds_what_the_rule_of_the_op_says(op):
    inference = known(op)
    by_hand = default_registry().lookup(op).rule
    assert inference.accepted, inference.report.refuted
    for number, sample in enumerate(KNOWN[op]):
        with quietly():
            draws = draw(op, number, sample, torch.Generator().manual_seed(1))
        inferred, written = rule_rows(inference.rule, draws), rule_rows(by_hand, draws)
        assert written <= inferred | set(inference.unsaid), (
            f"{inference.text} lacks {set(map(str, written - inferred))}"
        )
        true = {f.row for f in inference.findings if number in f.holds_for and number not in f.fails_for}
        assert inferred <= true, "the rule that is printed says more than was found"
        assert true <= inferred | set(inference.unsaid), "the rule that is printed leaves out what was found"


@pytest.mark.slow
@pytest.mark.sample
def test_what_is_found_beyond_the_rule_of_an_op_stands_before_the_oracle_by_itself():
    """Rows that the first-party rule lacks: they hold, but only for one sign of beta, which plans do not know."""
    op = aten.addmm.default
    inferred = known(op)
    with quietly():
        draws = draw(op, 0, KNOWN[op][0], torch.Generator())
    by_hand = default_registry().lookup(op).rule
    # By hand the rows of linear operands run a lowering, which looks for infinite factors.
    lowered = {row.inputs for row in by_hand.rows(call_of(by_hand, draws, zipped=False)) if row.lowered}
    beyond = {row.inputs for row in rule_rows(inferred.rule, draws) - rule_rows(by_hand, draws)}
    assert set(map(show_all, beyond - lowered)) == {"[P(max), R, R]", "[P(min), R, R]"}
    assert "[P(sum), P(sum), R]" in set(map(show_all, lowered))
    alone = rule(op, "m n, m k, k n -> m n", replicate="m n k", partial=["max, R, R -> max", "min, R, R -> min"])
    assert not check_rule(alone, KNOWN[op]).refuted


def test_lowered_rows_are_not_rows_of_the_op_itself():
    op, sample = aten.embedding.default, KNOWN[aten.embedding.default][0]
    by_hand = default_registry().lookup(op).rule
    with quietly():
        draws = draw(op, 0, sample, torch.Generator())
    lowered = {row.inputs for row in by_hand.rows(call_of(by_hand, draws, zipped=False)) if row.lowered}
    assert lowered
    assert not lowered & {f.row.inputs for f in infer(op, [sample]).findings if f.verdict == "all samples"}


# -- how rules read ----------------------------------------------------------------------------------------------


def last_statement(found):
    return found.text[found.text.index("\n\n") :].strip()


def test_a_product_reads_as_in_the_pages():
    inferred = known(aten.mm.default)
    assert last_statement(inferred) == (
        "MM = rule(\n"
        "    torch.ops.aten.mm.default,\n"
        '    "m k, k n -> m n",\n'
        '    reduce={"k": "sum"},\n'
        '    linear=("self", "mat2"),\n'
        ")"
    )


@pytest.mark.parametrize(
    ("op", "notation"),
    [
        pytest.param(aten.bmm.default, "b m k, b k n -> b m n", marks=[pytest.mark.slow, pytest.mark.sample]),
        pytest.param(aten.addmm.default, "m n, m k, k n -> m n", marks=[pytest.mark.slow, pytest.mark.sample]),
        (aten.neg.default, "... -> ..."),
        (aten.add.Tensor, "..., ... -> ..."),
        (aten.embedding.default, "d m, ... -> ... m"),
    ],
    ids=str,
)
def test_one_notation_serves_all_samples(op, notation):
    assert known(op).rule.text == notation


def test_samples_are_made_where_the_schema_is_enough():
    inferred = infer(aten.neg.default)
    assert inferred.rule.text == "... -> ..."
    assert inferred.rule.partial == ("linear in self, decreasing in self",)


def test_a_copy_moves():
    assert infer(aten.clone.default, [X]).rule.partial == ("moves in self",)


def test_a_dim_argument_is_read_and_not_guessed():
    inferred = known(aten._softmax.default)
    assert "return like(self, whole=(dim,))" in inferred.text
    verdicts = {str(f): (f.verdict, f.holds_for, f.fails_for) for f in inferred.findings}
    assert verdicts["[S(0)] -> [S(0)]"] == ("some samples", (0,), (1,))
    assert verdicts["[S(1)] -> [S(1)]"] == ("some samples", (1,), (0,))
    third = ((t(4, 5, 7), 2, False), {})
    assert not check_rule(inferred.rule, [third]).refuted, "it holds for a dim and a number of dims that no sample had"


def test_a_call_like_no_sample_stays_whole():
    inferred = known(aten.transpose.int)
    with quietly():
        draws = draw(aten.transpose.int, 0, ((t(8, 7, 5), 0, 2), {}), torch.Generator())
    assert {show_all(row.inputs) for row in rule_rows(inferred.rule, draws)} == {"[R]"}


def test_a_number_that_decides_is_asked_for():
    inferred = infer(op_of(leak), [((t(8, 5), 0.5), {}), ((t(8, 5), -0.5), {})])
    assert 'static=("slope",)' in inferred.text
    assert "(2, 0.5):  # sample 0" in inferred.text
    verdicts = {str(f): (f.verdict, f.holds_for) for f in inferred.findings}
    assert verdicts["[P(max)] -> [P(max)]"] == ("some samples", (0,))
    assert inferred.accepted
    assert not inferred.unsaid


def test_rows_that_no_notation_says_are_written_out():
    inferred = infer(aten.index.Tensor, [((t(8, 7), [indices(8, 5)]), {})])
    assert "Row((REPLICATE, shard(0)), (shard(0),))" in inferred.text
    assert inferred.accepted
    assert not inferred.unsaid


def test_lists_that_are_zipped():
    inferred = infer(aten._foreach_mul.List, [(([t(8, 5), t(7)], [t(8, 5) + 1, t(7)]), {})])
    assert inferred.rule.zip_lists
    assert inferred.rule.text == "..., ... -> ..."
    assert "product, product -> product" in inferred.rule.partial
    assert inferred.accepted


def test_a_view_with_a_shape_is_named():
    inferred = infer(aten.view.default, [((t(8, 6), [4, 12]), {})])
    assert rows_of(inferred) == {
        "[R] -> [R]",
        *(f"[P({k})] -> [P({k})]" for k in ("sum", "avg", "max", "min", "product")),
    }
    assert any("size holds a shape" in note and "local_args" in note for note in inferred.notes)


def test_the_same_seed_gives_the_same_answer_and_leaves_the_generator_alone():
    before = torch.get_rng_state()
    first, second = (infer(aten.relu.default, [X], seed=3) for _ in range(2))
    assert first.text == second.text
    assert first.findings == second.findings
    assert torch.equal(torch.get_rng_state(), before)


# -- black boxes -------------------------------------------------------------------------------------------------


def test_an_op_without_a_meta_kernel():
    inferred = infer(op_of(gate), [((t(8, 5), t(5, 7)), {}), ((t(5, 7), t(7, 4)), {})])
    assert inferred.rule.text == "m k, k n -> m n"
    assert rows_of(inferred) == {"[R, R] -> [R]", "[S(0), R] -> [S(0)]", "[R, S(1)] -> [S(1)]"}
    assert any("register_fake" in note for note in inferred.notes)
    assert inferred.accepted
    assert inferred.report.cases > 10


@pytest.mark.slow
@pytest.mark.sample
def test_a_norm():
    inferred = infer(op_of(norm), [((t(8, 5, 7), t(7), t(7) + 1), {}), ((t(5, 8), t(8), t(8) + 1), {})])
    assert inferred.rule.text == "... d, R, R -> ... d"
    assert inferred.rule.partial[0].startswith("linear in weight with bias, ")
    assert inferred.accepted


def test_an_op_that_writes_an_operand_and_returns_nothing():
    inferred = infer(op_of(add_into), [XY])
    assert "[S(1), S(1)] -> []" in rows_of(inferred)
    assert "[P(sum), P(sum)] -> []" in rows_of(inferred)
    assert "[P(sum), R] -> []" not in rows_of(inferred)
    assert inferred.accepted


@pytest.mark.slow
@pytest.mark.sample
def test_rounding_of_terms_that_cancel_refutes_no_row():
    """Among the values that the oracle draws, 2**16 and -2**16 meet in one sum."""
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((7, 8, 10), (8,)))
    inferred = infer(op_of(contract), [((x, y, "bcd,c->cd"), {})])
    assert inferred.accepted, inferred.report.refuted


def test_a_sum_that_has_one_sign_by_chance_gives_no_row():
    x, y = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in (10, 5))
    inferred = infer(op_of(contract), [((x, y, "d,a->d"), {})])
    assert not {row for row in rows_of(inferred) if "P(max)" in row or "P(min)" in row}
    assert inferred.accepted, inferred.report.refuted


@pytest.mark.parametrize("examples", [1, pytest.param(6, marks=[pytest.mark.slow, pytest.mark.sample])])
def test_a_contraction_has_one_row_per_letter(examples):
    settings(max_examples=examples, deadline=None)(given(st.data())(one_row_per_letter))()


def one_row_per_letter(data):
    letters = "abcd"
    left = "".join(data.draw(st.lists(st.sampled_from(letters), min_size=1, max_size=3, unique=True)))
    right = "".join(data.draw(st.lists(st.sampled_from(letters), min_size=1, max_size=2, unique=True)))
    made_of = sorted({*left, *right})
    out = "".join(data.draw(st.permutations([c for c in made_of if data.draw(st.booleans())])))
    # Distinct sizes, each with uneven shards that are not empty on 2 or 3 ranks.
    sizes = dict(zip(letters, (5, 7, 8, 10), strict=True))
    x, y = (torch.randn([sizes[c] for c in word], generator=torch.Generator().manual_seed(0)) for word in (left, right))
    inferred = infer(op_of(contract), [((x, y, f"{left},{right}->{out}"), {})])
    shards = {str(f) for f in inferred.findings if not any(isinstance(p, Partial) for p in f.row.inputs)}
    expected = {"[R, R] -> [R]"}
    for c in made_of:
        ins = [f"S({word.index(c)})" if c in word else "R" for word in (left, right)]
        expected.add(f"[{', '.join(ins)}] -> [{f'S({out.index(c)})' if c in out else 'P(sum)'}]")
    assert shards == expected
    assert inferred.accepted
    assert not inferred.unsaid


# -- what only seems to hold -------------------------------------------------------------------------------------


def test_a_row_for_even_shards_only():
    inferred = infer(op_of(even), [((t(8, 5),), {})])
    assert rows_of(inferred, "even shards only") == {"[S(0)] -> [P(avg)]"}
    assert "[S(0)] -> [P(avg)]" not in rows_of(inferred)
    assert "avg" not in str(inferred.rule.text)
    assert inferred.accepted


def test_a_row_for_shards_that_are_not_empty():
    inferred = infer(aten.amax.default, [((t(8, 7), [1]), {})])
    assert "[S(1)] -> [P(max)], no shard empty" in rows_of(inferred)
    assert "nonempty=" in inferred.text
    assert inferred.accepted


def test_sizes_that_cannot_tell_uneven_from_empty_are_told():
    inferred = infer(aten.amax.default, [((t(8, 6), [1]), {})])
    assert rows_of(inferred, "even shards only") == {"[S(1)] -> [P(max)]"}
    assert any("sizes as 5, 7 and 8" in note for note in inferred.notes)


def test_a_row_for_some_meshes_only():
    inferred = infer(op_of(by_fours), [((t(8, 7),), {})])
    (only,) = (f for f in inferred.findings if f.verdict == "some meshes")
    assert (str(only), only.meshes) == ("[S(0)] -> [S(0)]", (2,))
    # A reshape of nothing is ambiguous, so columns may be sharded as long as every rank has some.
    assert "[S(1)] -> [S(1)], no shard empty" in rows_of(inferred)


@pytest.mark.parametrize(
    "y",
    [
        pytest.param(torch.rand(8, 5) + 0.1, id="positive", marks=[pytest.mark.slow, pytest.mark.sample]),
        pytest.param(torch.ones(8, 5), id="ones"),
    ],
)
def test_an_operand_that_happens_not_to_matter(y):
    inferred = infer(op_of(below_zero), [((t(8, 5), y), {})])
    assert "[S(1), S(1)] -> [S(1)]" in rows_of(inferred)
    assert not {row for row in rows_of(inferred) if row.startswith(("[S(0), S(0)]", "[S(1), R]", "[S(0), P(sum)]"))}
    assert "[R, S(0)] -> [R]" not in {str(f) for f in inferred.findings}


@pytest.mark.slow
@pytest.mark.sample
def test_zeros_prove_nothing():
    inferred = infer(aten.mm.default, [((torch.zeros(8, 5), torch.zeros(5, 7)), {})])
    assert inferred.rule.text == "m k, k n -> m n"
    assert len(rows_of(inferred)) == 8


def test_a_threshold_far_from_the_sample():
    assert rows_of(infer(op_of(limited), [((t(8, 5) / 10,), {})])) == {
        *("[R] -> [R]", "[S(0)] -> [S(0)]", "[S(1)] -> [S(1)]", "[P(max)] -> [P(max)]", "[P(min)] -> [P(min)]")
    }


def test_a_minimum_of_exponentials_is_no_exponential_of_a_sum():
    """Large parts beside a small value: a tolerance by the largest part would take anything for the value."""
    assert rows_of(infer(aten.exp.default, [X])) == {
        *("[R] -> [R]", "[S(0)] -> [S(0)]", "[S(1)] -> [S(1)]", "[P(max)] -> [P(max)]", "[P(min)] -> [P(min)]")
    }
    wrong = rule(aten.exp.default, "... -> ...", partial=["sum -> min"])
    assert check_rule(wrong, [((t(8, 5) * 3,), {})], keep_going=True).refuted


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "samples", "reason"),
    [
        (aten.native_dropout.default, [((t(8, 5), 0.5, True), {})], "draws random numbers"),
        (op_of(counts), [((t(8, 5),), {})], "two runs of .* give different results"),
        (aten.nonzero.default, [((t(8, 5),), {})], "shapes of its results depend on the values"),
        (aten.add.default, [((1, 2), {})], "takes no tensors"),
        (aten.mm.default, [((t(8, 5), t(8, 5)), {})], "the op refuses every sample"),
        (aten.mm.default, [((t(0, 5), t(5, 3)), {})], "every sample is empty"),
        (aten.view.default, None, "its schema is not enough"),
    ],
    ids=str,
)
def test_refusals(op, samples, reason):
    with pytest.raises(InferenceError, match=reason):
        infer(op, samples)


def test_progress_ends_at_the_end():
    calls = []
    infer(aten.relu.default, [X, X], tell=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1]
