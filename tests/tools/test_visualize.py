"""``visualize``: each block lists the ranks that hold it, and pictures read as they should."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm import events
from shardwise.errors import CallError, PlacementError
from shardwise.kernel import dispatcher
from shardwise.kernel.mesh import AbstractMesh, coordinates
from shardwise.kernel.placements import is_strided, strided_shard
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.tensor.shards import scatter_local
from shardwise.testing import mesh
from shardwise.tools.layout_blocks import blocks_of, ranks_text
from shardwise.tools.visualize import visualize

PICTURE = Path(__file__).parents[2] / "docs" / "layout.svg"


@st.composite
def specs(draw):
    """Tensors of 0 to 4 dims on meshes of 1 to 3 dims, uneven, empty and strided."""
    shape = draw(st.lists(st.integers(0, 8), min_size=0, max_size=4))
    mesh_shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    single = [Replicate(), Partial(), Partial("max"), *map(Shard, range(len(shape)))]
    single += [strided_shard(d, 2) for d in range(len(shape))]
    placements = [draw(st.sampled_from(single)) for _ in mesh_shape]
    try:
        return TensorSpec(AbstractMesh(mesh_shape), placements, TensorMeta.contiguous(shape, torch.float32))
    except PlacementError:  # a strided shard that does not divide its dim
        placements = [Shard(p.dim) if is_strided((p,)) else p for p in placements]
        return TensorSpec(AbstractMesh(mesh_shape), placements, TensorMeta.contiguous(shape, torch.float32))


@given(specs())
def test_each_element_lies_in_a_block_of_exactly_the_ranks_that_hold_it(spec):
    """The ranks that hold an element: those in whose part of a tensor of numbers its number is."""
    blocks = blocks_of(spec)
    holders = {}
    whole = [p if not isinstance(p, Partial) else Replicate() for p in spec.placements]
    numbers = torch.arange(spec.tensor_meta.numel).reshape(spec.shape)
    copies = TensorSpec(spec.mesh, whole, TensorMeta.contiguous(spec.shape, torch.int64))
    for rank, at in enumerate(coordinates(spec.mesh_shape)):
        part = scatter_local(numbers, copies, at).flatten().tolist()
        for number in part:
            holders.setdefault(number, []).append(rank)
        assert (rank in blocks.empty) == (not part)
    for index in product(*map(range, spec.shape)):
        fitting = [
            cell
            for intervals, cell in blocks.cells.items()
            if all(low <= index[d] < high for d, (low, high) in zip(blocks.drawn, intervals, strict=True))
        ]
        assert len(fitting) == 1
        assert list(fitting[0].ranks) == holders[int(numbers[index])]
        parts = 1
        for m in spec.reductions:
            parts *= spec.mesh_shape[m]
        assert len(fitting[0].holders) == parts
    assert {*blocks.drawn, *blocks.whole} == set(range(spec.ndim))


@given(specs())
def test_every_layout_has_a_text_and_an_image(spec):
    picture = visualize(spec)
    ET.fromstring(picture.svg())  # noqa: S314  # our own text
    assert str(picture).startswith(f"{spec} on dim0 ")
    console = Console(width=400, color_system="truecolor", force_terminal=True)
    with console.capture() as captured:
        console.print(picture)
    assert str(picture).splitlines()[0] in captured.get()


GOLDEN = [
    (
        ((7, 6), (2, 2), ["S(0)", "S(1)"]),
        """
f32[7,6] [S(0), S(1)] on dim0 2, dim1 2
dim 0                0:3                              3:6  dim 1
      ┌────────────────────────────────┬────────────────────────────────┐
      │                                │                                │
  0:4 │               0                │               1                │
      │                                │                                │
      ├────────────────────────────────┼────────────────────────────────┤
      │                                │                                │
  4:7 │               2                │               3                │
      │                                │                                │
      └────────────────────────────────┴────────────────────────────────┘
""",
    ),
    (
        ((3, 2, 5), (4, 2), ["S(0)", "P"]),
        """
f32[3,2,5] [S(0), P(sum)] on dim0 4, dim1 2
dim 0                                0:2  dim 1
      ┌────────────────────────────────────────────────────────────────┐
      │////////////////////////////////////////////////////////////////│
  0:1 │//////////////////////////// 0 + 1 /////////////////////////////│
      │////////////////////////////////////////////////////////////////│
      ├────────────────────────────────────────────────────────────────┤
      │////////////////////////////////////////////////////////////////│
  1:2 │//////////////////////////// 2 + 3 /////////////////////////////│
      │////////////////////////////////////////////////////////////////│
      ├────────────────────────────────────────────────────────────────┤
      │////////////////////////////////////////////////////////////////│
  2:3 │//////////////////////////// 4 + 5 /////////////////////////////│
      │////////////////////////////////////////////////////////////////│
      └────────────────────────────────────────────────────────────────┘
dim 2: whole in every block
partial sum: ranks on both sides of + hold parts of each value
ranks 6,7: an empty part
""",
    ),
    (
        ((16,), (2, 2), [Shard(0), strided_shard(0, 2)]),
        """
f32[16] [S(0), _S(0, 2)] on dim0 2, dim1 2
    0:2      2:4      4:6      6:8      8:10    10:12    12:14    14:16  dim 0
 ┌────────┬────────┬────────┬────────┬────────┬────────┬────────┬────────┐
 │        │        │        │        │        │        │        │        │
 │   0    │   1    │   0    │   1    │   2    │   3    │   2    │   3    │
 │        │        │        │        │        │        │        │        │
 └────────┴────────┴────────┴────────┴────────┴────────┴────────┴────────┘
""",
    ),
    (
        ((), (2, 2), ["R", "P(max)"]),
        """
f32[] [R, P(max)] on dim0 2, dim1 2
 ┌────────────────────────────────────────────────────────────────┐
 │////////////////////////////////////////////////////////////////│
 │//////////////////////// max(0,2; 1,3) /////////////////////////│
 │////////////////////////////////////////////////////////////////│
 └────────────────────────────────────────────────────────────────┘
partial max: ranks on both sides of ; hold parts of each value
ranks with a comma or a dash between them hold copies
""",
    ),
    (
        ((2, 2, 3), (2, 2, 2), ["S(0)", "S(1)", "S(2)"]),
        """
f32[2,2,3] [S(0), S(1), S(2)] on dim0 2, dim1 2, dim2 2
dim 2: 0:2
dim 0                0:1                              1:2  dim 1
      ┌────────────────────────────────┬────────────────────────────────┐
      │                                │                                │
  0:1 │               0                │               2                │
      │                                │                                │
      ├────────────────────────────────┼────────────────────────────────┤
      │                                │                                │
  1:2 │               4                │               6                │
      │                                │                                │
      └────────────────────────────────┴────────────────────────────────┘
dim 2: 2:3
dim 0                0:1                              1:2  dim 1
      ┌────────────────────────────────┬────────────────────────────────┐
      │                                │                                │
  0:1 │               1                │               3                │
      │                                │                                │
      ├────────────────────────────────┼────────────────────────────────┤
      │                                │                                │
  1:2 │               5                │               7                │
      │                                │                                │
      └────────────────────────────────┴────────────────────────────────┘
""",
    ),
    (((0, 4), (2,), ["S(1)"]), "\nf32[0,4] [S(1)] on dim0 2\nthe tensor has no elements\n"),
]


@pytest.mark.parametrize(("arguments", "text"), GOLDEN, ids=[str(one[0][2]) for one in GOLDEN])
def test_pictures_as_text(arguments, text):
    assert str(visualize(*arguments)) == text.strip("\n")


def test_dims_and_names_may_be_said():
    picture = visualize((4, 4, 4), (2, 2), ["S(0)", "S(1)"], names=("dp", "tp"), dims=(-1, 0))
    assert "on dp 2, tp 2" in str(picture)
    assert (picture.blocks.rows, picture.blocks.columns, picture.blocks.others) == (2, 0, (1,))


def test_one_placement_may_stand_alone():
    assert str(visualize((3, 4), (2,), "S(0)")) == str(visualize((3, 4), (2,), [Shard(0)]))


def test_ranks_are_short():
    assert ranks_text([3, 2, 1, 0, 6]) == "0-3,6"
    assert ranks_text([4, 5]) == "4,5"
    assert ranks_text([8, 0, 24, 16]) == "0-24 by 8"
    assert ranks_text([]) == ""


def test_a_large_mesh_is_drawn_in_part():
    picture = visualize((4096, 4096), (64, 64), ["S(0)", "S(1)"])
    assert "dim 0: the first 24 of 64 blocks" in picture.notes


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ((torch.zeros(3),), CallError, "a Tensor lies on a mesh"),
        (((3, 4),), CallError, "not a shape with a mesh's shape and placements"),
        (((3, -4), (2,), ["R"]), CallError, "Write visualize"),
        (((3, 4), (2,), ["S(2)"]), PlacementError, "there is no dim 2"),
        (((3, 4), (2, 2), ["S(0)"]), PlacementError, "1 placement for a mesh of 2 dims"),
        (((3, 4), (0, 2), ["R", "R"]), CallError, "a whole number above 0"),
        (((3, 4), 2, ["R"]), CallError, "show a tensor on a mesh 2"),
        (((3, 4), (2,), ["X"]), PlacementError, r"it is not S\(d\)"),
    ],
)
def test_what_is_no_layout_is_refused(arguments, kind, words):
    with pytest.raises(kind, match=words):
        visualize(*arguments)
    with pytest.raises(CallError, match="a name for each or for not one"):
        visualize((3, 4), (2, 2), ["R", "R"], names=["dp"])
    with pytest.raises(CallError, match="one or two dims"):
        visualize((3, 4), (2,), ["R"], dims="01")
    with pytest.raises(CallError, match="one or two dims"):
        visualize((3, 4), (2,), ["R"], dims=(0, 2))
    with pytest.raises(CallError, match="one or two dims"):
        visualize((3, 4), (2,), ["R"], dims=(0, 0))


def on_one_rank():
    """Rank 1 alone draws: no op runs and nothing is sent, or it would wait for ever."""
    x = sw.distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh((2,)), [Shard(0)])
    seen = []
    with events.observe(seen.append), dispatcher.observe(seen.append):
        if torch.distributed.get_rank():
            text, html = str(sw.visualize(x)), x._repr_html_()
            assert html.startswith("<svg")
            assert "0:2" in text
            with sw.on(mesh((2,))):
                assert str(sw.visualize(x)) == text
    assert not seen


def test_nothing_runs_and_nothing_is_sent(two_ranks):
    two_ranks.run(on_one_rank)


def test_the_image_of_the_page_is_what_is_drawn():
    picture = visualize((7, 6), (2, 2, 2), ["S(0)", "P", "S(1)"], names=("dp", "cp", "tp"))
    assert PICTURE.read_text() == picture.svg()


def test_more_ranks_than_can_be_looked_at_are_refused():
    with pytest.raises(CallError, match="1,000,000,000 ranks"):
        visualize((4,), (10**9,), ["S(0)"])
