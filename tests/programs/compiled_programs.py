"""Run a random program as one compiled function on the ranks, and compare what it leaves with one device."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from attrs import evolve
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.distributed_c10d import _resolve_process_group

from shardwise.errors import WorkerError
from shardwise.kernel.mesh import AbstractMesh, coordinates
from shardwise.kernel.signature import signature
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.modes import outside_modes
from shardwise.tensor.mesh_tensor import MeshTensor
from shardwise.tensor.shards import scatter_local
from shardwise.testing import mesh
from shardwise.testing.judge import difference
from shardwise.testing.programs import Assign, Call, Copy, Leaf, Move, check_program
from shardwise.testing.programs.machine import (
    cotangents,
    decided_by_chance,
    filled_in,
    flows,
    follow_back,
    quietly,
    reference,
)
from shardwise.testing.programs.program import op_called, operands_of
from shardwise.testing.programs.replay import Held, leaf_on_mesh
from shardwise.testing.trial import copied

TIMEOUT = 120.0

# Their results or the shapes of these depend on data, which no graph knows.
OPEN = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}

# What compiled code refuses and eager mode does not: an answer of other ranks, and a write to a copied view.
REFUSALS = "TracingError", "InPlaceError"


def compilable(program):
    """The program without the lines that no whole graph can have, nor those that need their results."""
    lines, there = [], set()
    for line in program.lines:
        if there.issuperset(operands_of(line)) and not _stays_outside(line):
            lines.append(line)
            there.update(line.names)
    backward = tuple(pair for pair in program.backward if pair[0] in there)
    return evolve(program, lines=tuple(lines), backward=backward)


def _stays_outside(line):
    if isinstance(line, (Copy, Assign)):
        return True
    if not isinstance(line, Call):
        return False
    op = op_called(line.op)
    # Dynamo takes no out= that is not contiguous, and gives an out= of another shape up.
    return decided_by_chance(op) or bool(OPEN & set(op.tags)) or any(arg.is_out for arg in signature(op).args)


def check_compiled(pool, program, backend="graphs"):
    """What became of a program: counted, and raised if the compiled one differs from one device."""
    program = compilable(program)
    says_nothing = _says_nothing(program, pool)
    if says_nothing:
        return Counter([says_nothing])
    after, gradients = reference(program)
    last = {name: value for one in after for name, value in one.values.items()}
    loose = {name for one in after for name in one.loose}
    tolerance = max(one.tolerance for one in after)
    try:
        by_rank = pool.run(run_compiled, program, list(last), backend, timeout=TIMEOUT)
    except WorkerError as error:
        pool.close()
        if any(refusal in str(error) for refusal in REFUSALS):
            return Counter(["refused while tracing"])
        # A rank's part with no or one row has an open size in its graph.
        if any(compiled_on_one_device(program, list(last), backend, dynamic=d) is None for d in (None, True)):
            return Counter(["torch does not compile it"])
        raise
    counts = Counter(["ran"])
    for i, expected in enumerate((last, gradients)):
        for name, whole in expected.items():
            if whole is not None:
                held = [answer[i].get(name) for answer in by_rank]
                wrong = _difference(program, held, whole, tolerance * (1, 10)[i], values=name not in loose)
                if wrong and _differs_on_one_device(program, (last, gradients), loose, tolerance, backend):
                    return Counter(["torch compiles it to something else"])
                assert not wrong, f"{'gradient of ' * i}value {name}: {wrong}"
                counts[("values", "gradients")[i]] += 1
    return counts


def _says_nothing(program, pool):
    """Why the program is not compiled; empty if it is."""
    if not any(isinstance(line, (Call, Move)) for line in program.lines):
        return "nothing left"
    try:
        verdict = check_program(program, pool)
    except Exception:  # noqa: BLE001 - torch refuses what is left
        return "refused on one device"
    wrong = verdict.wrong or any("refused" in what or "left" in what or what == "unsteady" for what in verdict.counts)
    return "not in eager mode" if wrong else ""


def _difference(program, held, whole, tolerance, *, values):
    first = held[0]
    if first is None or first.meta is None:
        return f"rank 0 has {first}"
    if any(h is None or h.placements != first.placements or h.meta != first.meta for h in held):
        return "the ranks have different placements or metas for it"
    if (first.meta.shape, first.meta.dtype) != (whole.shape, whole.dtype):
        return f"it is {first.meta}, on one device {TensorMeta.of(whole)}"
    spec = TensorSpec(AbstractMesh(program.mesh_shape), first.placements, first.meta)
    parts = {at: h.local for at, h in zip(coordinates(program.mesh_shape), held, strict=True)}
    # A compiler may compute a zero of the other sign.
    return difference(parts, spec, whole, tolerance, values=values, signs=False)


def _differs_on_one_device(program, expected, loose, tolerance, backend):
    """Whether torch alone gives other values or gradients when it compiles the program: some decompositions do."""
    compiled = compiled_on_one_device(program, list(expected[0]), backend)
    alone = evolve(program, mesh_shape=())
    return compiled is None or any(
        _difference(
            alone,
            [Held(found[n].detach(), (), TensorMeta.of(whole))],
            whole,
            tolerance * factor,
            values=n not in loose,
        )
        for found, wanted, factor in zip(compiled, expected, (1, 10), strict=True)
        for n, whole in wanted.items()
        if whole is not None and found.get(n) is not None
    )


def compiled_on_one_device(program, wanted, backend, dynamic=None):
    """The values of these names after the compiled program on plain tensors, and the leaves' gradients; None where
    torch cannot compile it.
    """
    torch._dynamo.reset()
    function = function_of(program, wanted)
    try:
        with quietly(), torch.set_grad_enabled(program.grad):
            leaves = {line.name: copied(line.value) for line in program.lines if isinstance(line, Leaf)}
            given = {n: leaf.requires_grad_(program.grad and flows(leaf)) for n, leaf in leaves.items()}
            made_by = BACKENDS[backend](compare=False)
            compiled = torch.compile(function, backend=made_by, fullgraph=True, dynamic=dynamic)
            values = dict(zip(wanted, compiled(*given.values()), strict=True))
            gradients = {}
            if program.backward:
                roots = [values[name] for name, _ in program.backward]
                gradients = follow_back(program, given, roots, cotangents(program, values))
    except Exception:  # noqa: BLE001 - whatever it is, it is torch's
        return None
    return values, gradients


# -- on a rank -----------------------------------------------------------------------------------------------------


def run_compiled(program, wanted, backend):
    """The values of these names after the compiled program, and the leaves' gradients, as this rank holds them."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    device_mesh = mesh(program.mesh_shape)
    leaves = [line for line in program.lines if isinstance(line, Leaf)]
    function = torch.compile(function_of(program, wanted), backend=BACKENDS[backend](compare=True), fullgraph=True)
    with torch.set_grad_enabled(program.grad):
        given = {line.name: leaf_on_mesh(line, device_mesh, requires_grad=program.grad) for line in leaves}
        values = given | dict(zip(wanted, function(*given.values()), strict=True))
        gradients = {}
        if program.backward:
            specs = [TensorSpec(device_mesh, p, values[n].spec.tensor_meta) for n, p in program.backward]
            wholes = cotangents(program, values)
            roots = [values[name] for name, _ in program.backward]
            cotangent = [MeshTensor(scatter_local(w, s), s) for w, s in zip(wholes, specs, strict=True)]
            gradients = follow_back(program, given, roots, cotangent)
    return [{n: held(t) for n, t in of.items() if t is not None} for of in (values, gradients)]


def function_of(program, wanted):
    """The program as a function of its leaves that returns its values of these names."""
    lines = [line for line in program.lines if not isinstance(line, Leaf)]
    names = [line.name for line in program.lines if isinstance(line, Leaf)]
    roots = {name for name, _ in program.backward}
    ops = {line.op: op_called(line.op) for line in lines if isinstance(line, Call)}

    def function(*leaves):
        values = dict(zip(names, leaves, strict=True))
        for line in lines:
            if isinstance(line, Move):
                source = values[line.source]
                is_plain = type(source) is torch.Tensor
                moved = source if is_plain else source.redistribute(placements=line.placements)
                values[line.name] = moved.clone()
                continue
            args, kwargs = filled_in(line, values)
            results = ops[line.op](*args, **kwargs)
            if line.names:  # dynamo gives results to ops that have none
                values.update(zip(line.names, tensors_in(results), strict=True))
        # A graph holds the backward pass of all that it returns, also where torch has no formula for it.
        return [values[name] if name in roots else values[name].detach() for name in wanted]

    return function


def tensors_in(results):
    if isinstance(results, (list, tuple)):
        return [tensor for part in results for tensor in tensors_in(part)]
    return [results] if results is None or isinstance(results, torch.Tensor) else []


def held(tensor):
    if not isinstance(tensor, MeshTensor):
        return Held(torch.as_tensor(tensor).detach().clone(), plain=type(tensor).__name__)
    return Held(tensor.to_local().detach().clone(), tensor.spec.placements, tensor.spec.tensor_meta)


def graphs(*, compare, collectives=None):
    """Runs the graphs as they are, after inductor's passes over the joint graph.

    With ``compare`` it raises if the ranks' graphs do not send the same, and adds what they send to ``collectives``.
    """
    # On the ranks alone: inductor takes more than a second to import, and nobody who only collects tests needs it.
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    def partition(joint, inputs, **options):
        joint_graph_passes(joint)
        # The passes take away an `add` of zero and the like that made a slice contiguous. Inductor's view takes any
        # strides; torch's reads those of the tensor.
        for node in joint.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default
        return min_cut_rematerialization_partition(joint, inputs, **options)

    def run(graph, _):
        if compare:
            sent = sent_by(graph)
            of_ranks = [None] * dist.get_world_size()
            with outside_modes():
                dist.all_gather_object(of_ranks, sent)
            # A rank that sends less than another of its group would wait for it for ever.
            for ranks, ops in sent.items():
                assert all(of_ranks[rank].get(ranks) == ops for rank in ranks), of_ranks
            if collectives is not None:
                collectives.extend(op for ops in sent.values() for op in ops)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=run, decompositions=select_decomp_table(), partition_fn=partition)


def sent_by(graph):
    """The collectives of a graph in their order, by the ranks of their groups. A group without elements has none."""
    sent = defaultdict(list)
    for node in graph.graph.nodes:
        if "c10d" in str(node.target) and "wait" not in str(node.target):
            sent[tuple(dist.get_process_group_ranks(_resolve_process_group(node.args[-1])))].append(str(node.target))
    return dict(sent)


BACKENDS = {"graphs": graphs, "aot_eager": lambda **_: "aot_eager", "inductor": lambda **_: "inductor"}
