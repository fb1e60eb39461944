"""Random programs as one compiled function each, on random meshes and placements, against one device.

They are those of ``test_programs.py``, less what no whole graph can have. What torch alone does not compile says
nothing; most programs must compile.
"""

from __future__ import annotations

from collections import Counter

import made_programs
import pytest
import torch
from compiled_programs import check_compiled, compilable

from shardwise import Partial, Replicate, Shard
from shardwise.testing.programs import Call, Leaf, Move, Program, Value


def check_seeds(pool, seeds, backend="graphs"):
    """Check the programs of these seeds, all ranks' graphs compared; most must have run."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        program = made_programs.drawn_program(pool.world_size, seed)
        try:
            counts += check_compiled(pool, program, backend)
        except Exception as error:
            pool.close()
            raise AssertionError(f"the program of seed {seed}: {error}\n\n{compilable(program)}") from error
    assert counts["ran"] > 0.6 * len(seeds), counts
    return counts


def written_by(op, *rest, rows=5, **named):
    """A program that writes rows of a tensor whose rows are sharded."""
    x, source = (torch.arange(float(n * 4)).reshape(n, 4).sin() for n in (rows, 3))
    index = torch.tensor([3, 0, 4] if rows > 1 else [0, 0, 0])
    leaves = Leaf(0, x, (Shard(0),)), Leaf(1, index, (Replicate(),)), Leaf(2, source, (Replicate(),))
    arguments = {"index": (Value(0), 0, Value(1), *rest), "put": (Value(0), [Value(1)], *rest)}
    call = Call((3,), op, arguments["put" if "put" in op else "index"], named)
    return Program((2,), (*leaves, call), backward=((3, (Shard(0),)),), grad=True)


WRITES = {
    "index_copy": written_by("aten.index_copy.default", Value(2)),
    "index_copy, a rank without rows": written_by("aten.index_copy.default", Value(2), rows=1),
    "index_add": written_by("aten.index_add.default", Value(2), alpha=2),
    "index_fill": written_by("aten.index_fill.int_Scalar", 1.5),
    "index_reduce": written_by("aten.index_reduce.default", Value(2), "mean", include_self=False),
    "index_put": written_by("aten.index_put.default", Value(2)),
    "index_put, a rank without rows": written_by("aten.index_put.default", Value(2), True, rows=1),
}


SAMPLE = [pytest.mark.slow, pytest.mark.sample]
OF_THE_SAMPLE = "index_copy", "index_fill", "index_put"


@pytest.mark.parametrize("name", [pytest.param(n, marks=SAMPLE if n in OF_THE_SAMPLE else ()) for n in WRITES])
def test_rows_are_written_where_they_are(two_ranks, name):
    # Which entries of the index a rank has depends on data, and so would the sizes in its graph.
    assert check_compiled(two_ranks, WRITES[name])["gradients"]


@pytest.mark.parametrize(
    ("op", "divisor"),
    [
        ("aten.div.Tensor", 0.0),
        ("aten.div_.Tensor", -1.5),
        pytest.param("aten.div.Tensor", -1.5, marks=SAMPLE),
        pytest.param("aten.div_.Tensor", 0.0, marks=SAMPLE),
    ],
)
def test_a_partial_sum_is_divided_by_a_number_that_no_graph_knows(two_ranks, op, divisor):
    x = torch.arange(1.0, 7.0).reshape(2, 3).sin()
    leaves = Leaf(0, x, (Partial("sum"),)), Leaf(1, torch.tensor(divisor), (Replicate(),))
    program = Program((2,), (*leaves, Call((2,), op, (Value(0), Value(1)))))
    assert check_compiled(two_ranks, program)["values"]


@pytest.mark.parametrize(
    "placement", [Shard(0), *(pytest.param(p, marks=pytest.mark.slow) for p in (Shard(1), Replicate()))]
)
def test_looked_up_rows_are_scaled_where_they_are(two_ranks, placement):
    table = torch.arange(20.0).reshape(5, 4).sin() * 3
    leaves = Leaf(0, table, (placement,)), Leaf(1, torch.tensor([4, 1, 4]), (Replicate(),))
    call = Call((2,), "aten.embedding_renorm_.default", (Value(0), Value(1), 1.5, 2.0))
    assert check_compiled(two_ranks, Program((2,), (*leaves, call)))["values"]


def test_a_storage_offset_is_refused_by_name(two_ranks):
    leaf = Leaf(0, torch.arange(12.0).reshape(3, 4), (Shard(0),))
    call = Call((1,), "aten.as_strided.default", (Value(0), [2, 2], [3, 5], 1))
    assert check_compiled(two_ranks, Program((2,), (leaf, call)))["refused while tracing"]


def test_products_of_groups_compile(two_ranks):
    a, b = (torch.arange(float(n)).sin().to(torch.bfloat16) for n in (5 * 8, 3 * 8 * 8))
    leaves = (
        Leaf(0, a.reshape(5, 8), (Replicate(),)),
        Leaf(1, b.reshape(3, 8, 8), (Shard(2),)),
        Leaf(2, torch.tensor([2, 2, 5], dtype=torch.int32), (Replicate(),)),
    )
    call = Call((3,), "aten._grouped_mm.default", (Value(0), Value(1), Value(2), None, None))
    assert check_compiled(two_ranks, Program((2,), (*leaves, call)))["values"]


def test_a_part_that_was_written_back_is_sent_as_it_was_written(two_ranks):
    # Each rank writes its rows of a gathered result, a view with a storage offset, and torch leaves out the copy.
    x = torch.arange(35).reshape(5, 7)
    leaves = (
        Leaf(0, x, (Shard(0),)),
        Leaf(1, x % 3 > 0, (Replicate(),)),
        Leaf(2, -x.flatten(), (Replicate(),)),
        Leaf(3, x.double(), (Shard(0),)),
    )
    written = Call((4,), "aten.masked_scatter_.default", (Value(0), Value(1), Value(2)))
    lines = *leaves, written, Move(5, 4, (Shard(1),)), Call((6,), "aten.sin.default", (Value(3),))
    program = Program((2,), lines, backward=((6, (Shard(0),)),), grad=True)
    assert check_compiled(two_ranks, program)["values"] == 7


def test_compiled_programs_compute_what_one_device_does(two_ranks):
    check_seeds(two_ranks, [10])  # torch 2.11 to 2.13 compile it


@pytest.mark.slow
@pytest.mark.sample
@pytest.mark.timeout(600)
def test_a_fixed_sample_of_compiled_programs(two_ranks):
    counts = check_seeds(two_ranks, [4, 7, *range(600, 621)])
    assert counts["gradients"] > 10


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(4))
def test_many_compiled_programs(pool, number):
    check_seeds(pool, range(100 * number, 100 * (number + 1)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_programs_that_inductor_compiles(two_ranks):
    check_seeds(two_ranks, range(600, 620), "inductor")
