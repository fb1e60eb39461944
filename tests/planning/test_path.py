import itertools
import math
from heapq import heappop, heappush

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwise.errors import LayoutError, MeshMismatchError
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.placements import REPLICATE, Partial, Shard, parse_placement, partial, shard
from shardwise.kernel.reductions import REDUCE_OPS, reduce_pieces
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning import layout_graph
from shardwise.planning.bounds import Bounds
from shardwise.planning.cost import Connection, Link, Links, links_of, use_links
from shardwise.planning.layout_graph import decode, encode, graph_of
from shardwise.planning.path import bound, path_cost, shortest_path
from shardwise.tensor.shards import assemble, scatter_local


def spec(mesh_shape, shape, text, dtype=torch.float32, device_type="cpu"):
    placements = [parse_placement(word) for word in text.split()]
    return TensorSpec(AbstractMesh(mesh_shape, device_type), placements, TensorMeta.contiguous(shape, dtype))


def steps(mesh_shape, shape, src, dst, **how):
    path = shortest_path(spec(mesh_shape, shape, src, **how), spec(mesh_shape, shape, dst, **how))
    return [(step.kind, step.mesh_dims) for step in path.steps]


# -- golden: what is chosen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("R", "R", []),
        ("P(sum)", "R", ["all_reduce"]),
        ("P(max)", "R", ["all_reduce"]),
        ("P(sum)", "S(1)", ["reduce_scatter"]),
        ("S(0)", "R", ["all_gather"]),
        ("S(0)", "S(1)", ["all_to_all"]),
        ("R", "S(1)", ["slice"]),
        ("R", "P(sum)", ["fill"]),
        ("R", "P(avg)", ["fill"]),
        ("S(0)", "P(sum)", ["fill"]),
        ("S(0)", "P(max)", ["all_gather", "fill"]),
        ("P(sum)", "P(max)", ["all_reduce", "fill"]),
    ],
)
def test_one_mesh_dim_takes_the_direct_step(src, dst, expected):
    assert [kind for kind, _ in steps((4,), (512, 512), src, dst)] == expected


@pytest.mark.parametrize(
    ("src", "dst", "expected"),
    [
        ("P(sum) P(sum)", "R R", [("all_reduce", (0, 1))]),
        ("P(sum) P(sum)", "R P(sum)", [("all_reduce", (0,))]),
        ("S(0) S(0)", "R R", [("all_gather", (0, 1))]),
        ("S(0) S(1)", "R R", [("all_gather", (0, 1))]),
        ("S(0) S(0)", "S(0) R", [("all_gather", (1,))]),
        ("S(0) S(0)", "S(1) S(1)", [("all_to_all", (0, 1))]),
        ("P(sum) P(sum)", "S(0) S(0)", [("reduce_scatter", (0, 1))]),
        ("P(sum) P(sum)", "S(0) R", [("reduce_scatter", (0,)), ("all_reduce", (1,))]),
        ("S(0) P(sum)", "S(1) S(1)", [("all_to_all", (0,)), ("reduce_scatter", (1,))]),
        ("S(0) R", "P(sum) P(sum)", [("fill", (0,)), ("fill", (1,))]),
        ("P(sum) P(max)", "R R", [("all_reduce", (1,)), ("all_reduce", (0,))]),
        ("P(max) R", "P(max) P(sum)", [("fill", (1,))]),
        ("R P(max)", "P(product) P(max)", [("fill", (0,))]),
        ("R R", "S(1) S(0)", [("slice", (0,)), ("slice", (1,))]),
    ],
)
def test_two_mesh_dims_merge_where_they_may(src, dst, expected):
    assert sorted(steps((2, 2), (64, 64), src, dst)) == sorted(expected)


def test_mesh_dims_of_one_rank_only_change_their_labels():
    assert steps((1, 4, 1), (64, 64), "S(0) P(sum) P(max)", "P(avg) R S(1)") == [
        ("relabel", (0, 2)),
        ("all_reduce", (1,)),
    ]


def test_only_the_right_most_mesh_dim_of_a_tensor_dim_is_gathered():
    for mesh_dims in (dims for _, dims in steps((2, 2), (64, 64), "S(0) S(0)", "R S(0)")):
        assert mesh_dims != (0,)


def test_a_large_tensor_crosses_the_slow_link_in_parts():
    links = Links((Link(1e-5, 1e-5, 1e9), Link(1e-5, 1e-5, 1e11)), local_start=1e-6, memory_bandwidth=1e12)
    src, dst = (spec((2, 4), (4096, 4096), text, device_type="cuda") for text in ("S(0) R", "R R"))
    use_links(src.mesh, links)
    try:
        first, *rest = shortest_path(src, dst).steps
    finally:
        use_links(src.mesh, None)
    assert first.kind == "slice"
    assert [step.kind for step in rest][-1] == "all_gather"
    assert all(step.mesh_dims == (1,) for step in [first, rest[-1]])


def test_a_step_tells_its_tensor_dims_and_reduction():
    (scatter,) = shortest_path(spec((4,), (8, 8), "P(avg)"), spec((4,), (8, 8), "S(1)")).steps
    assert (scatter.tensor_dims, scatter.reduction, scatter.nbytes) == ((1,), "avg", 64)
    (exchange,) = shortest_path(spec((4,), (8, 8), "S(1)"), spec((4,), (8, 8), "S(0)")).steps
    assert (exchange.tensor_dims, exchange.reduction, exchange.nbytes) == ((0, 1), None, 16)
    assert str(scatter) == "reduce_scatter[0] [P(avg)] -> [S(1)]"


# -- refusals -------------------------------------------------------------------------------------------------------


def test_specs_of_two_meshes_are_refused():
    with pytest.raises(MeshMismatchError, match="another mesh"):
        shortest_path(spec((4,), (8,), "R"), spec((2, 2), (8,), "R R"))


@pytest.mark.parametrize(("shape", "dtype"), [((9,), torch.float32), ((8,), torch.float64)])
def test_specs_of_two_tensors_are_refused(shape, dtype):
    with pytest.raises(LayoutError, match="another shape or dtype"):
        shortest_path(spec((4,), (8,), "R"), spec((4,), shape, "S(0)", dtype=dtype))


@pytest.mark.parametrize(("kind", "dtype"), [("avg", torch.bool), ("max", torch.complex64)])
def test_a_reduction_that_the_dtype_lacks_is_refused(kind, dtype):
    src, dst = (spec((4,), (8,), text, dtype=dtype) for text in (f"P({kind})", "R"))
    with pytest.raises(LayoutError, match=f"cannot be reduced by {kind}"):
        shortest_path(src, dst)
    assert path_cost(src, dst) == math.inf


# -- laws -----------------------------------------------------------------------------------------------------------

LINKS = [
    Link(start=3e-5, latency=3e-5, bandwidth=1.5e9),
    Link(start=1e-5, latency=1e-6, bandwidth=1e11),
    Link(start=1e-4, latency=1e-5, bandwidth=1e8),
]


@st.composite
def tensors(draw, max_mesh_ndim=4, max_dim=9):
    """A mesh shape and a meta; sizes 0 and 1 and uneven ones are as likely as others."""
    mesh_shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=max_mesh_ndim)))
    shape = tuple(draw(st.lists(st.integers(0, max_dim), max_size=3)))
    scale = draw(st.sampled_from([1, 1, 1000]))
    meta = TensorMeta.contiguous([n * scale for n in shape], torch.float64)
    return AbstractMesh(mesh_shape), meta


def placements(mesh, meta, kinds=REDUCE_OPS):
    each = st.sampled_from([REPLICATE, *map(shard, range(meta.ndim)), *map(partial, kinds)])
    return st.tuples(*[each] * mesh.ndim)


@st.composite
def some_specs(draw, count, **how):
    """Specs of one tensor on one mesh."""
    mesh, meta = draw(tensors(**how))
    return [TensorSpec(mesh, draw(placements(mesh, meta)), meta) for _ in range(count)]


@st.composite
def figures(draw, mesh_ndim):
    """Every kind of collective has figures of its own on every mesh dim, and perhaps over the whole mesh."""
    connection = st.builds(Connection, *[st.sampled_from(LINKS)] * 4)
    mesh_dims = draw(st.tuples(*[connection] * mesh_ndim))
    return Links(mesh_dims, 2e-6, 1e10, draw(st.none() | connection))


# A law is tried on so many examples every day, and on as many as it names in .ci/run's sample.
EVERYDAY = 100


def law(examples, *given_by):
    """A test of a law, whose function takes what ``given_by`` draws: a short one every day, and a long one."""

    def decorate(holds):
        sizes = [EVERYDAY, pytest.param(examples, marks=[pytest.mark.slow, pytest.mark.sample])]

        @pytest.mark.parametrize("examples", sizes)
        def test(examples):
            settings(max_examples=examples, deadline=None)(given(*given_by)(holds))()

        test.__doc__ = holds.__doc__
        return test

    return decorate


def at_most(small, large):
    return small <= large * (1 + 1e-9)


@law(200, some_specs(3), st.data())
def test_costs_are_distances(specs, data):
    a, b, c = specs
    use_links(a.mesh, data.draw(figures(a.mesh.ndim)))
    try:
        assert at_most(path_cost(a, c), path_cost(a, b) + path_cost(b, c))
        assert (path_cost(a, b) == 0) == (a is b)
        assert path_cost(a, b) >= 0
    finally:
        use_links(a.mesh, None)


@law(300, some_specs(2), st.data())
def test_bounds_sum_to_at_most_the_cost(specs, data):
    src, dst = specs
    use_links(src.mesh, data.draw(figures(src.mesh.ndim)))
    try:
        bounds = [bound(src, m, placement) for m, placement in enumerate(dst.placements)]
        assert sum(bounds) <= path_cost(src, dst)
        for b, here, there in zip(bounds, src.placements, dst.placements, strict=True):
            assert (b == 0) == (here == there)
    finally:
        use_links(src.mesh, None)


@law(300, some_specs(2, max_mesh_ndim=5), st.data())
def test_no_bound_on_the_first_mesh_dims_exceeds_the_cost(specs, data):
    """Neither in bytes and starts together, which replace the sums, nor in what must leave and come back."""
    src, dst = specs
    use_links(src.mesh, data.draw(figures(src.mesh.ndim)))
    try:
        source, goal = (tuple(map(encode, s.placements)) for s in (src, dst))
        known = Bounds(graph_of(src, links_of(src.mesh)), source)
        steps = [known.step(m, code) for m, code in enumerate(goal)]
        for count in range(1, len(goal) + 1):
            moving, back = known.prefix(goal[:count])
            before = sum(fixed for fixed, _ in steps)
            summed = sum(fixed + bytewise for fixed, bytewise in steps)
            assert max(before + moving, summed) + back <= path_cost(src, dst)
    finally:
        use_links(src.mesh, None)


def cheapest_without_estimate(src, dst):
    """Dijkstra over the whole graph: every layout, and every reduction made and reduced anywhere."""
    steps_of = graph_of(src, links_of(src.mesh))
    start, goal = tuple(map(encode, src.placements)), tuple(map(encode, dst.placements))
    partials = [-1 - k for k in range(len(REDUCE_OPS))]
    best, heap = {start: 0.0}, [(0.0, start)]
    while heap:
        cost, layout = heappop(heap)
        if layout == goal:
            return cost
        if cost > best[layout]:
            continue
        edges = [edge for code in partials for edge in steps_of.fills(layout, (code,) * len(layout))]
        for step, after, *_ in [*steps_of.edges(layout), *edges]:
            if cost + step < best.get(after, math.inf):
                best[after] = cost + step
                heappush(heap, (cost + step, after))
    return math.inf


@law(150, some_specs(2, max_mesh_ndim=3), st.data())
def test_the_search_finds_the_cheapest_way_there_is(specs, data):
    src, dst = specs
    assume(1 not in src.mesh_shape)
    use_links(src.mesh, data.draw(figures(src.mesh.ndim)))
    try:
        assert path_cost(src, dst) == pytest.approx(cheapest_without_estimate(src, dst), rel=1e-9)
    finally:
        use_links(src.mesh, None)


def test_a_link_that_is_said_to_be_faster_than_memory_makes_no_detour_cheap():
    """A fill and a reduce-scatter write more than a slice does, and would cost less by that link's own figure."""
    slow, fast, slowest = LINKS
    src, dst = (spec((3, 2, 2), (1000, 1000), text, torch.float64) for text in ("R R S(1)", "R S(0) R"))
    connections = [(fast, slow, slow, slow), (slow, fast, slow, slow), (slowest, slow, slow, slowest)]
    use_links(src.mesh, Links(tuple(Connection(*links) for links in connections), 2e-6, 1e10))
    try:
        assert path_cost(src, dst) == pytest.approx(cheapest_without_estimate(src, dst), rel=1e-9)
    finally:
        use_links(src.mesh, None)


@settings(deadline=None)
@given(some_specs(2))
def test_steps_lead_from_one_layout_to_the_next(specs):
    src, dst = specs
    path = shortest_path(src, dst)
    at = src.placements
    for step in path.steps:
        assert step.source == at
        changed = [m for m in range(src.mesh.ndim) if step.source[m] != step.target[m]]
        assert changed == list(step.mesh_dims)
        assert step.cost > 0
        at = step.target
    assert at == dst.placements
    assert path.cost == pytest.approx(sum(step.cost for step in path.steps))


@settings(deadline=None)
@given(some_specs(2))
def test_the_answer_does_not_depend_on_what_was_asked_before(specs):
    src, dst = specs
    first = shortest_path(src, dst)
    for cache in ("_cached_graph", "_steps_by_layout"):
        getattr(layout_graph, cache).cache_clear()
    assert shortest_path(src, dst) == first


@settings(deadline=None)
@given(st.integers(-5, 6))
def test_codes_stand_for_placements(code):
    assume(code >= -len(REDUCE_OPS))
    assert encode(decode(code)) == code


# -- the steps on simulated ranks -----------------------------------------------------------------------------------


def random_locals(at):
    """Local tensors of all ranks that a tensor laid out so could have: partial parts are all different."""
    generator = torch.Generator().manual_seed(0)
    settled = at.with_placements([REPLICATE if isinstance(p, Partial) else p for p in at.placements])
    parts = {}
    locals_ = {}
    for c in at.mesh.coordinates():
        key = tuple(c[m] for m in at.reductions)
        if key not in parts:
            parts[key] = torch.randint(-3, 4, at.shape, generator=generator).to(at.dtype)
        locals_[c] = scatter_local(parts[key], settled, c)
    return locals_


def joined(pieces, placement):
    if isinstance(placement, Shard):
        return torch.cat(pieces, placement.dim)
    return reduce_pieces(pieces, placement.reduce_op) if isinstance(placement, Partial) else pieces[0]


def simulate(step, parts, at):
    """The step by its definition: what each group holds together, placed anew."""
    after = at.with_placements(step.target)
    locals_ = {}
    for c in parts:
        members = {}
        for along in itertools.product(*(range(at.mesh_shape[m]) for m in step.mesh_dims)):
            full = list(c)
            for m, i in zip(step.mesh_dims, along, strict=True):
                full[m] = i
            members[along] = parts[tuple(full)]
        for m in reversed(step.mesh_dims):
            heads = dict.fromkeys(key[:-1] for key in members)
            size = range(at.mesh_shape[m])
            members = {head: joined([members[*head, i] for i in size], step.source[m]) for head in heads}
        whole = TensorMeta.of(members[()])
        mesh = AbstractMesh([at.mesh_shape[m] for m in step.mesh_dims])
        inner = TensorSpec(mesh, [step.target[m] for m in step.mesh_dims], whole)
        locals_[c] = scatter_local(members[()], inner, [c[m] for m in step.mesh_dims])
        assert tuple(locals_[c].shape) == after.local_shape(c)
    return locals_


@law(150, some_specs(2, max_dim=6))
def test_the_steps_keep_the_tensor_what_it_is(specs):
    src, dst = specs
    assume(src.tensor_meta.numel <= 1000)
    parts, at = random_locals(src), src
    full = assemble(parts, src)
    for step in shortest_path(src, dst).steps:
        parts = simulate(step, parts, at)
        at = at.with_placements(step.target)
        torch.testing.assert_close(assemble(parts, at), full, msg=lambda text, s=step: f"{s}: {text}")
    assert at is dst
