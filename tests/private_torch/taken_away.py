"""What shardwise does where torch lacks a part that is not public: a program that prints JSON.

Each case runs in a process of its own, a copy of one that has torch and nothing of shardwise: it takes the part away,
imports shardwise and runs a program. The object has an outcome for each case: what the program returned, or the error.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module, reload
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.backends.debugging  # this and the next once for all cases
import torch.distributed as dist
import torch.distributed.tensor
from attrs import frozen

# -- taking away -----------------------------------------------------------------------------------------------------


def delete(name: str) -> None:
    """Take a part away for everybody."""
    path, _, last = name.rpartition(".")
    owner = import_module(path) if path in sys.modules else _find(path)
    delattr(owner, last)


def _find(path: str) -> Any:
    first, *rest = path.split(".")
    found: Any = import_module(first)
    for at, attribute in enumerate(rest, 2):
        found = getattr(found, attribute, None) or import_module(".".join(path.split(".")[:at]))
    return found


def hide(*names: str) -> None:
    """Take parts away for shardwise alone: torch itself needs them for what a program does."""
    from shardwise.private_torch import parts

    find = parts.find_part
    parts.find_part = lambda name: None if name in names else find(name)


def forget(module: str, function: str, instead: Any) -> None:
    """Have a function of the shelf do as little as torch does where it takes no notice of what the function says."""
    setattr(import_module(f"shardwise.private_torch.{module}"), function, instead)


# -- programs --------------------------------------------------------------------------------------------------------


def on_two_ranks(program: Callable[[], Any]) -> Any:
    """What the first of two ranks returns."""
    folder = tempfile.mkdtemp()

    def rank(number: int) -> Any:
        store = dist.FileStore(f"{folder}/store", 2)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2)
        try:
            return program()
        finally:
            dist.destroy_process_group()

    second = in_a_copy(lambda: rank(1))
    first = in_a_copy(lambda: rank(0))
    results = [wait(process) for process in (first, second)]
    for outcome in results:
        if "error" in outcome:
            raise Failed(outcome)
    return results[0]["returned"]


def trained() -> list[float]:
    """Losses of a model with tensor parallelism, and what its parameters become."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    plan = {"0.*": {"tp": sw.Shard(0)}, "2.weight": {"tp": sw.Shard(1)}}
    model = sw.distribute_module(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = sw.distribute_tensor(torch.randn(4, 6), mesh, [sw.Replicate()])
    losses = []
    for _ in range(3):
        loss = (model(x) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses + [p.full_tensor().sum().item() for p in model.parameters()]


def parametrized() -> float:
    """A layer that gets a parametrization before it trains."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 4)
    sw.distribute_module(layer, init_device_mesh("cpu", (2,)), {"weight": [sw.Shard(0)]})
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    return layer(torch.ones(2, 4)).sum().item()


def scripted() -> list[float]:
    """A scripted function and a traced module."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    x = sw.distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [sw.Shard(0)])
    traced = torch.jit.trace(torch.nn.Tanh(), torch.ones(4, 3))
    script = torch.jit.CompilationUnit("def double(x):\n    return x * 2.0\n").double
    return [call(x).sum().item() for call in (traced, script) for _ in range(3)]


def compiled() -> list[float]:
    """A compiled step at two sizes."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    mesh = init_device_mesh("cpu", (2,))
    step = torch.compile(lambda x, w: torch.relu(x @ w).sum(), backend="aot_eager")
    totals = []
    for size in (4, 5, 6):
        torch.manual_seed(size)
        x = sw.distribute_tensor(torch.randn(size, 3), mesh, [sw.Shard(0)])
        w = sw.distribute_tensor(torch.randn(3, 2), mesh, [sw.Replicate()])
        totals.append(step(x, w).full_tensor().item())
    return totals


def held_from_before() -> float:
    """Compiled code that uses a parameter from before ``distribute_module``."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    weight = model.weight
    mesh = init_device_mesh("cpu", (2,))
    sw.distribute_module(model, mesh, {"weight": [sw.Shard(0)]})
    x = sw.distribute_tensor(torch.ones(4, 3), mesh)
    try:
        torch.compile(lambda x: (x @ weight.t()).sum(), backend="aot_eager")(x).backward()
    except torch._dynamo.exc.InternalTorchDynamoError as error:
        raise error.__context__ from None  # dynamo makes an error of its own of each
    return model.weight.grad.full_tensor().sum().item()


def refused_while_compiled() -> bool:
    """Whether the error that compiled code meets says what to do; by which class is another matter."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    x = sw.distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)))
    try:
        torch.compile(lambda x: x.redistribute(placements=[sw.Shard(7)]), backend="aot_eager")(x)
    except RuntimeError as error:
        return "Use a shard dim from -2 to 1" in str(error)
    return False


def half_used() -> list[float]:
    """The gradient of a compiled function of which one result is not used."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    mesh = init_device_mesh("cpu", (2,))
    w = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)]).requires_grad_()
    used, _ = torch.compile(lambda w: (w * 2, w * 3), backend="aot_eager")(w)
    used.sum().backward()
    return w.grad.full_tensor().tolist()


def with_a_custom_op() -> list[float]:
    """A custom op with a rule."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw
    from shardwise.rule import rule

    op = torch.library.custom_op("taken_away::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(torch.empty_like)
    mesh = init_device_mesh("cpu", (2,))
    with sw.override(rule(op, "... -> ...")):
        y = op(sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)]))
        assert y.placements == (sw.Shard(0),)
        return y.full_tensor().tolist()


def numbered() -> int:
    """How far the number that is said is from that of the next node."""
    from shardwise.private_torch.autograd_nodes import sequence_number

    x = torch.ones(2, requires_grad=True)
    return sequence_number() - (x * 2).grad_fn._sequence_nr()


def told() -> int:
    """A number in the store that both ranks have added to."""
    from shardwise.private_torch.distributed import default_store

    default_store().add("taken_away", dist.get_rank() + 1)
    dist.barrier()
    return default_store().add("taken_away", 0)


def stored() -> str:
    """The storage of a tensor, which is refused, whoever asks."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw
    from shardwise.errors import LayoutError

    try:
        sw.zeros(4, device_mesh=init_device_mesh("cpu", (2,)), placements=[sw.Shard(0)]).untyped_storage()
    except LayoutError:
        return "refused"
    return "lent"


def with_gloo() -> float:
    """A sum over two ranks, whose groups may share a device."""
    from shardwise.private_torch.distributed import share_gloo_device

    def program() -> float:
        share_gloo_device("lo")
        group = dist.new_group([0, 1])
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        return total.item()

    return on_two_ranks(program)


def asserted() -> str:
    """What an assertion says that is false."""
    from shardwise.private_torch.tracing import assert_when_run

    assert_when_run(torch.tensor(True), "it is")
    try:
        assert_when_run(torch.tensor(False), "it is not")
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def on_a_card() -> list[Any]:
    """A backward pass of fake CUDA tensors."""
    from shardwise.private_torch.absent_card import as_on
    from shardwise.private_torch.fake import fake_tensors

    with fake_tensors(), as_on("cuda"):
        layer = torch.nn.LSTM(3, 4, bias=False)
        layer(torch.randn(2, 5, 3))[0].sum().backward()
        return [str(layer.weight_ih_l0.grad.device), list(layer.weight_ih_l0.grad.shape)]


def rehearsed() -> bool:
    """Whether a program runs without data."""
    from shardwise.private_torch.fake import is_rehearsing, rehearsing

    with rehearsing():
        return is_rehearsing()


def staged() -> list[float]:
    """A tensor on a mesh of this processor as torch copies it to the host before it saves it."""
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = sw.distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [sw.Shard(0)])
    return StateDictStager(False, False).stage({"x": x})["x"].tolist()


def told_by_vmap() -> list[bool]:
    """Which tensors are vmap's."""
    from shardwise.private_torch.dispatch import is_batched

    seen = []
    torch.vmap(lambda t: seen.append(is_batched(t)) or t)(torch.ones(2))
    return [*seen, is_batched(torch.ones(2))]


def moved_in_transforms() -> list[list[float]]:
    """Derivatives, by torch.func and by autograd, of functions that move a tensor on a mesh of this processor."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    x = sw.distribute_tensor(torch.arange(4.0), mesh, [sw.Shard(0)])

    def cubes(y: Any) -> Any:
        return sw.MeshTensor.from_local(y.to_local() ** 3, mesh, [sw.Shard(0)]).redistribute(
            placements=[sw.Replicate()]
        )

    rows = x.unsqueeze(0).expand(2, 4)
    slopes = torch.vmap(torch.func.grad(lambda y: (cubes(y) * x.redistribute(placements=[sw.Replicate()])).sum()))(rows)
    return [*slopes.full_tensor().tolist(), *torch.autograd.functional.jacobian(cubes, x, vectorize=True).tolist()]


def preloaded() -> bool:
    """Whether a fork server has the plugins."""
    import shardwise.testing.preloaded  # noqa: F401
    from shardwise.discovery.process import default_registry

    return torch.ops.aten.mm.default in {entry.op for entry in default_registry().ops()}


def shelf(module: str, function: str, *args: Any) -> Callable[[], Any]:
    """A call of a function of the shelf."""
    return lambda: getattr(import_module(f"shardwise.private_torch.{module}"), function)(*args)


def beside_other_tools() -> list[float]:
    """A program that imports torch's tools for placing modules, which shardwise asks before they start."""
    for name in ("fsdp", "pipelining"):
        import_module(f"torch.distributed.{name}")
    return recorded()


def in_a_hook(call: Callable[[], Any]) -> Callable[[], None]:
    """A call in a backward pass."""

    def run() -> None:
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda _: call())
        x.sum().backward()

    return run


def noted() -> Any:
    """What a graph notes of a sum."""
    from shardwise.private_torch import sizes

    return sizes._noted(None, int.__add__, 1, 2)


def scaled() -> None:
    """A step of a scaler without data."""
    from shardwise.private_torch.fake import fake_tensors

    with fake_tensors():
        layer = torch.nn.Linear(2, 2)
        layer(torch.ones(1, 2)).sum().backward()
        torch.amp.GradScaler("cpu").step(torch.optim.SGD(layer.parameters()))


def gathered() -> None:
    """A state dict by torch's function."""
    import shardwise as sw

    assert sw.MeshTensor
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    get_model_state_dict(torch.nn.Linear(2, 2))


def recorded() -> list[float]:
    """A graph of a function of tensors on a mesh."""
    from torch.distributed.device_mesh import init_device_mesh

    import shardwise as sw

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    x = sw.distribute_tensor(torch.arange(4.0), init_device_mesh("cpu", (1,)), [sw.Shard(0)])
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: x * 2)(x)(x + 1).full_tensor().tolist()


def custom_op(missing: str) -> Callable[[], Any]:
    """What the shelf does with a custom op that lacks an attribute."""

    def run() -> Any:
        from shardwise.private_torch import ops

        op = torch.library.custom_op(
            "taken_away::kept", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        if missing == "_opoverload":
            del op._opoverload
            return ops.overload_of(op)
        has = (name.rpartition(".")[2] for name in ops._PARTS)
        return ops.parts_of(SimpleNamespace(**{name: getattr(op, name) for name in has if name != missing}))

    return run


def without_parameters() -> None:
    """A module of a torch that keeps its parameters elsewhere."""
    from shardwise.private_torch.dispatch import swap_parameter

    module = torch.nn.Linear(2, 2)
    del vars(module)["_parameters"]
    swap_parameter(module, "bias", torch.ones(2))


def leave_in_place(*names: str) -> None:
    """Have the stand-in for a card leave parts of ``torch.cuda`` as they are: a torch without them asks none."""
    functions = import_module("shardwise.private_torch.cuda_functions")
    replaced, without = functions.replaced, {name.rpartition(".")[2] for name in names}
    functions.replaced = lambda owner, **values: replaced(
        owner, **{name: value for name, value in values.items() if name not in without}
    )


# -- the cases -------------------------------------------------------------------------------------------------------


@frozen
class Case:
    """Parts of torch that are taken away together, and a program after that."""

    names: tuple[str, ...]
    program: Callable[[], Any]
    take: Callable[..., None] = lambda *names: [delete(name) for name in names]

    def run(self) -> Any:
        """Take the parts away, and run the program."""
        warnings.simplefilter("ignore")
        self.take(*self.names)
        return self.program()


def nothing(*_: str) -> None:
    """The program itself has an object that lacks the part."""


C, FX, C10D = "torch._C", "torch.fx.experimental.proxy_tensor", "torch.distributed.distributed_c10d"
CUSTOM = "torch._library.custom_ops.CustomOpDef"

# Names without an underscore of what torch does not document. The scan of the source does not see them.
UNDOCUMENTED = tuple(f"{FX}.{name}" for name in ("proxy_call", "track_tensor", "has_proxy_slot", "wrap_key"))

TRAINED, COMPILED = partial(on_two_ranks, trained), partial(on_two_ranks, compiled)

HALF_USED = partial(on_two_ranks, half_used)

# The same numbers in another way.
FALLBACKS = [
    Case(("torch.Tensor._dtensor__new__",), TRAINED, take=hide),
    Case((f"{C}._disabled_torch_function_impl",), TRAINED, take=hide),
    Case(("torch._higher_order_ops", "torch._ops._higher_order_ops"), TRAINED, take=hide),
    Case(
        ("torch.utils._foreach_utils._foreach_supported_types", "torch.optim.optimizer._foreach_supported_types"),
        TRAINED,
        take=hide,
    ),
    Case(("torch.nn.utils.parametrize._maybe_set",), partial(on_two_ranks, parametrized), take=hide),
    Case((f"{C}.ScriptMethod",), partial(on_two_ranks, scripted), take=hide),
    Case(
        tuple(f"{C}.{kind}Dict" for kind in ("Module", "Parameter", "Buffer")),
        partial(on_two_ranks, scripted),
        take=hide,
    ),
    Case(
        ("._debug_flush_compilation_cache",),
        partial(on_two_ranks, scripted),
        take=lambda _: delete(f"{C}.ScriptFunction._debug_flush_compilation_cache"),
    ),
    Case(("._op",), TRAINED, take=lambda _: forget("ops", "direct_call", lambda op: op)),
    Case((f"{C}.TensorBase", f"{C}._VariableFunctions", f"{C}._nn"), TRAINED, take=hide),
    Case((f"{C10D}._get_default_store",), partial(on_two_ranks, told), take=hide),
    Case(
        ("torch._subclasses.meta_utils.MetaTensorDescriber.describe_tensor",), partial(on_two_ranks, stored), take=hide
    ),
    Case(
        ("._Options", "._devices", "._threads", "._timeout"),
        with_gloo,
        take=lambda *_: delete("torch.distributed.ProcessGroupGloo._Options"),
    ),
    Case(("torch.library.Library._register_torch_dispatch_rule",), partial(on_two_ranks, with_a_custom_op)),
    Case((f"{C}._autograd._get_sequence_nr",), numbered),
    Case((f"{C}._functorch.is_legacy_batchedtensor",), told_by_vmap),
    Case((f"{C}._are_functorch_transforms_active", f"{C}._functorch.is_functorch_wrapped_tensor"), TRAINED, take=hide),
    Case(
        ("torch.autograd.forward_ad._current_level",),
        TRAINED,
        take=lambda _: forget("transforms", "_level", lambda: 0),
    ),
    Case(("torch._assert_async",), asserted),
    Case(("._get_sequence_number_for_group",), TRAINED, take=lambda _: forget("distributed", "calls_of", lambda _: 0)),
    Case(("._tensor_to_object",), rehearsed, take=lambda _: delete(f"{C10D}._tensor_to_object")),
    Case(
        ("torch.distributed.checkpoint._state_dict_stager",),
        staged,
        take=lambda _: forget("distributed", "is_staging", lambda _: False),
    ),
    Case(("torch.cuda._exchange_device", "torch.cuda._maybe_exchange_device"), on_a_card),
    Case(
        ("torch.cuda._initialized", "torch.cuda._lazy_call", "torch.cuda._lazy_init", "._lazy_init"),
        on_a_card,
        take=leave_in_place,
    ),
    Case(("torch._dynamo.trace_rules",), on_a_card, take=lambda name: sys.modules.pop(name, None)),
    Case(
        ("torch._dynamo.backends.debugging", "torch._inductor.compile_fx"),
        preloaded,
        take=lambda *names: sys.modules.update(dict.fromkeys(names)),
    ),
    Case(("torch.utils._debug_mode",), TRAINED, take=lambda *names: sys.modules.update(dict.fromkeys(names))),
    Case(("torch._C._set_print_stack_traces_on_fatal_signal",), shelf("crashes", "show_native_stacks"), take=hide),
    Case(
        ("torch._inductor.config",),
        shelf("distributed", "calls_go_unseen"),
        take=lambda name: sys.modules.pop(name, None),
    ),
    Case(("torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState.init",), beside_other_tools),
    Case(("torch.distributed.pipelining.stage._PipelineStageBase.__init__",), beside_other_tools),
]
# The same in compiled programs, which take long. Marks that torch reads: here it takes no notice of them.
COMPILED_FALLBACKS = [
    Case(
        (
            f"{C}._dynamo.eval_frame.set_code_exec_strategy",
            f"{C}._dynamo.eval_frame._FrameAction.SKIP",
            f"{C}._dynamo.eval_frame._FrameExecStrategy",
        ),
        COMPILED,
        take=hide,
    ),
    Case((f"{FX}._build_proxy_for_sym_expr", "._build_proxy_for_sym_expr"), COMPILED, take=hide),
    Case(
        ("torch._dynamo.convert_frame.CatchErrorsWrapper", "torch._dynamo.types.ConvertFrameReturn"),
        partial(on_two_ranks, refused_while_compiled),
        take=hide,
    ),
    Case(
        ("torch._dynamo.variables.tensor",),
        COMPILED,
        take=lambda _: forget("transforms", "_forget", lambda *_: None),
    ),
    Case(("._dynamo_unbacked_indices",), COMPILED, take=lambda _: forget("sizes", "let_vary", lambda *_: None)),
    Case(("._dynamo_marked_constant",), COMPILED, take=lambda _: forget("tracing", "constant_in_graphs", lambda f: f)),
]
# Torch asks for what shardwise gives it. One that does not ask raises an error of its own.
ERROR_OF_TORCH = Case(
    ("torch.Tensor.__coerce_same_metadata_as_tangent__",),
    HALF_USED,
    take=lambda _: forget("tracing", "take_plain_tangents", lambda *_: None),
)

# An error where the part is needed.
ERRORS = [
    *(
        Case((n,), partial(on_two_ranks, held_from_before), take=hide)
        for n in ("torch._dynamo.variables.builder.VariableBuilder.wrap_tensor", "torch._dynamo.source.AttrSource")
    ),
    *(
        Case((name,), moved_in_transforms, take=hide)
        for name in (
            f"{C}._functorch.get_unwrapped",
            f"{C}._functorch.maybe_get_bdim",
            "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
            "torch._functorch.pyfunctorch.retrieve_all_functorch_interpreters",
            f"{C}._vmapmode_increment_nesting",
            f"{C}._vmapmode_decrement_nesting",
            "torch._remove_batch_dim",
            "torch._add_batch_dim",
        )
    ),
    Case((f"{C}._current_autograd_node",), shelf("autograd_nodes", "running_node")),
    Case((f"{C}._will_engine_execute_node",), in_a_hook(shelf("dispatch", "leaf_to_accumulate"))),
    Case(
        ("torch.autograd.graph.Node._sequence_nr", "._sequence_nr"),
        shelf("autograd_nodes", "running_node"),
        take=lambda *_: forget("autograd_nodes", "_current_node", SimpleNamespace),
    ),
    Case(
        ("torch.autograd.Variable._execution_engine.queue_callback",),
        shelf("autograd_nodes", "at_end_of_backward", print),
        take=hide,
    ),
    Case((f"{C}._functorch.is_batchedtensor",), told_by_vmap, take=hide),
    Case(("torch.Tensor._is_zerotensor",), shelf("dispatch", "is_zero_tensor", torch.ones(1)), take=hide),
    Case(("torch.nn.Module._parameters",), without_parameters, take=nothing),
    *(
        Case((f"{CUSTOM}.{n}",), custom_op(n), take=nothing)
        for n in (
            "_opoverload",
            "_init_fn",
            "_qualname",
            "_schema",
            "_backend_fns",
            "_abstract_fn",
            "_backward_fn",
            "_setup_context_fn",
        )
    ),
    Case(
        ("torch._ops.HigherOrderOperator.py_impl",),
        shelf("ops", "for_class", object(), torch.Tensor, print),
        take=nothing,
    ),
    Case(("torch._ops.OpOverload._op_dk", "._op_dk"), shelf("ops", "kernel_at", object(), None), take=nothing),
    Case(
        ("torch._decomp.decomposition_table",),
        shelf("ops", "python_decomposition", torch.ops.aten.neg.default),
        take=hide,
    ),
    Case(
        ("torch.ops._c10d_functional",),
        shelf("distributed", "graph_all_reduce", torch.ones(1), "sum", None),
        take=lambda _: forget("distributed", "_functional", SimpleNamespace()),
    ),
    Case(
        ("torch.distributed.device_mesh._mesh_resources.get_current_mesh",),
        shelf("distributed", "current_mesh"),
        take=hide,
    ),
    Case(
        (f"{C10D}._process_group_name", "._process_group_name"),
        shelf("distributed", "new_local_group", [0], "name"),
        take=lambda name, _: delete(name),
    ),
    *(
        Case((f"torch.distributed._state_dict_utils.{n}",), gathered, take=hide)
        for n in (
            "_gather_state_dict",
            "_distribute_state_dict",
            "_broadcast_state_dict",
            "_offload_state_dict_to_cpu",
        )
    ),
    Case(("torch.distributed.checkpoint.filesystem._StorageInfo",), shelf("saved", "layout_named"), take=hide),
    Case(("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",), shelf("saved", "layout_named"), take=hide),
    Case(("torch.serialization._get_layout",), shelf("saved", "layout_named")),
    Case(("torch.testing._internal.distributed.fake_pg.FakeStore",), shelf("fake", "fake_store")),
    Case(("torch.amp.GradScaler._maybe_opt_step",), scaled),
    *(Case((name,), recorded, take=hide) for name in UNDOCUMENTED),
    Case((f"{FX}._sym_register",), noted, take=hide),
    *(
        Case((f"torch.{n}",), shelf("tracing", short, 0), take=hide)
        for n, short in (
            ("_from_functional_tensor", "_of_functional"),
            ("_is_functional_tensor", "_is_functional"),
            ("_sync", "_sync"),
        )
    ),
    Case(("torch._dynamo.backends.common.aot_autograd",), shelf("tracing", "seeing_graphs", print), take=hide),
    Case(("torch.ops.aten.grid_sampler.default._dispatch_cache", "._dispatch_cache"), on_a_card, take=hide),
    Case(("torch.ops.aten.grid_sampler.default._op_dk",), on_a_card, take=hide),
    Case(("torch.library.Library._destroy", "._destroy"), on_a_card, take=hide),
    *(
        Case((n,), on_a_card, take=hide)
        for n in (
            f"{C}._AutoDispatchBelowAutograd",
            f"{C}._get_sdp_priority_order",
            "torch._meta_registrations",
            "torch._subclasses.fake_tensor.run_fallback_kernel",
        )
    ),
    *(
        Case((n,), on_a_card, take=hide)
        for n in (
            f"{C}._acc.DeviceGuard",
            f"{C}._acc.register_python_privateuseone_device_guard",
            f"{C}._autograd.DeviceType.CUDA",
            f"{C}._ensureCUDADeviceGuardSet",
            f"{C}._get_accelerator",
        )
    ),
]


def at_import(name: str) -> Any:
    """Import shardwise without a part that it cannot do without."""
    try:
        delete(name)
    except (AttributeError, TypeError):  # one of a class in C, which stays as it is
        hide(name)
        reload(import_module("shardwise.private_torch"))
    import shardwise as sw

    return sw.MeshTensor


# -- processes -------------------------------------------------------------------------------------------------------


class Failed(Exception):  # noqa: N818
    """A rank raised."""


def in_a_copy(call: Callable[[], Any]) -> tuple[int, Path]:
    """Run a call in a copy of this process; the copy's id, and the file of its outcome."""
    handle, name = tempfile.mkstemp()
    os.close(handle)
    pid = os.fork()
    if pid:
        return pid, Path(name)
    outcome: dict[str, Any]
    try:
        outcome = {"returned": call()}
    except Failed as failed:
        outcome = failed.args[0]
    except BaseException as error:  # noqa: BLE001  it is the outcome
        outcome = {
            "error": type(error).__name__,
            "message": str(error),
            "part": vars(error).get("fields", {}).get("part"),
            "where": "".join(traceback.format_exception(error)[-4:]),
        }
    Path(name).write_text(json.dumps(outcome, default=repr))
    os._exit(0)


def wait(process: tuple[int, Path]) -> dict[str, Any]:
    """The outcome of a copy."""
    pid, file = process
    _, status = os.waitpid(pid, 0)
    text = file.read_text()
    file.unlink()
    return json.loads(text) if text else {"error": "death", "message": str(status)}


def required() -> list[str]:
    """The parts without which nothing works, read from the source: shardwise is not imported here."""
    folder = Path(find_spec("shardwise").origin).parent / "private_torch"
    (value,) = (
        node.value
        for node in ast.walk(ast.parse((folder / "__init__.py").read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REQUIRED"
    )
    return [*ast.literal_eval(value), "torch.distributed.tensor.placement_types._StridedShard"]


def untouched(case: Case) -> str:
    """The name under which the program of a case runs with all parts there."""
    first = next(other for other in (*FALLBACKS, *COMPILED_FALLBACKS) if other.program is case.program)
    return f"untouched {first.names[0]}"


def outcomes(which: str) -> dict[str, Any]:
    """The outcome of each case by its first name, and of each program with all parts there."""
    calls: dict[str, Callable[[], Any]] = {}
    if which == "compiled":
        cases, again = [*COMPILED_FALLBACKS, ERROR_OF_TORCH], COMPILED_FALLBACKS
    else:
        cases, again = [*FALLBACKS, *ERRORS], FALLBACKS
        calls |= {name: partial(at_import, name) for name in required()}
    calls |= {case.names[0]: case.run for case in cases}
    for case in again:
        calls.setdefault(untouched(case), case.program)
    return {name: wait(in_a_copy(call)) for name, call in calls.items()}


if __name__ == "__main__":
    print(json.dumps(outcomes(sys.argv[1])))
