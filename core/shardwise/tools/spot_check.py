"""Spot checks of rules: some calls of a program run again on whole tensors, and the results are compared.

Which calls is decided by counting those of each mesh, which are the same on all its ranks. For such a call the operands
are gathered, the op runs as planned and once more on the whole operands, and its results and what it has written are
gathered and compared: integers exactly, other numbers up to what another order of additions may change. Memory that
nobody writes holds NaN in both runs, so ops that return such memory agree.

Not checked are ops that draw random numbers, calls on several meshes, calls inside of compiled graphs, steps of
optimizers that run on local tensors, and calls that one device refuses.
"""

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.call_sites import short_line, users_frame
from shardwise.comm.groups import backend_of
from shardwise.comm.rank_failures import all_say
from shardwise.comm.redistribute import route
from shardwise.errors import RankDisagreementError, SettingsError, WrongRuleError
from shardwise.kernel.arguments import refuse_argument
from shardwise.kernel.dispatcher import check_calls, observe
from shardwise.kernel.engine import Handler
from shardwise.kernel.nested import tensors_in
from shardwise.kernel.placements import REPLICATE
from shardwise.kernel.plan import Plan
from shardwise.kernel.signature import Op, op_name, signature
from shardwise.private_torch.dispatch import leave_out_of_graphs
from shardwise.private_torch.fake import is_rehearsing
from shardwise.private_torch.tracing import is_recorded
from shardwise.settings import read_settings
from shardwise.tensor.mesh_tensor import MeshTensor

__all__ = ["filled_memory", "verify", "verify_if_asked"]

# Of the largest magnitude among operands and results, by the dtype of a result: a few (half precision) to some thousand
# roundings. A wrong rule is wrong by far more.
_WITHIN = {torch.bfloat16: 2.0**-4, torch.float16: 2.0**-6, torch.float32: 2.0**-12, torch.float64: 2.0**-36}


@contextmanager
def verify(share: float) -> Iterator[Counter[str]]:
    """Check a share of the calls on MeshTensors against whole tensors, from 0 to 1, while the context lasts.

    Yields a counter with the ops that were checked. Every rank must enter and leave the context at the same point, and
    make the same calls in it, also those that send nothing. The setting ``verify`` is the same for a whole program.

    A call whose results differ raises :class:`WrongRuleError` on every rank of its mesh, after it ran. Raises
    :class:`RankDisagreementError` where the ranks do not check the same call, and :class:`SettingsError` for a share
    that is not from 0 to 1.
    """
    if isinstance(share, bool) or not isinstance(share, (int, float)):
        refuse_argument("verify a share of all calls", "share", share, "Write 0.001 for one call in a thousand.")
    if not 0 <= share <= 1:
        raise SettingsError(
            asked=f"verify a share of {share} of all calls",
            found="it is not from 0 to 1",
            do="Write 0.001 for one call in a thousand.",
            setting="verify",
        )
    checks = _SpotChecks(share)
    with check_calls(checks.around):
        yield checks.checked


def verify_if_asked() -> None:
    """Check calls from now on if the setting ``verify`` is above 0."""
    share = read_settings().verify
    if share:
        context = verify(share)
        context.__enter__()
        _for_ever.append(context)


_for_ever: list[Any] = []


class _SpotChecks:
    """Which calls are checked, and what was."""

    def __init__(self, share: float) -> None:
        self.share = share
        self.checked: Counter[str] = Counter()
        self._calls: Counter[int] = Counter()  # by hash of the mesh

    def around(self, handle: Handler, op: Op) -> Handler:
        """A handler that checks some of the calls of another one."""
        if torch.Tag.nondeterministic_seeded in op.tags:
            return handle

        def handle_and_check(
            cls: Any, op: Op, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            mesh = _mesh([args, kwargs])
            if mesh is None or not self._is_due(mesh):
                return handle(cls, op, types, args, kwargs)
            self.checked[op_name(op)] += 1
            return _checked(lambda: handle(cls, op, types, args, kwargs), op, args, kwargs or {}, mesh)

        leave_out_of_graphs(handle_and_check)
        return handle_and_check

    def _is_due(self, mesh: DeviceMesh) -> bool:
        self._calls[hash(mesh)] += 1
        number = self._calls[hash(mesh)]
        return int(number * self.share) > int((number - 1) * self.share)


def _mesh(operands: Any) -> DeviceMesh | None:
    """The mesh of a call that can be checked, else None."""
    tensors = [t for t in tensors_in(operands) if isinstance(t, MeshTensor)]
    meshes = {t._spec.mesh for t in tensors}
    mesh = next(iter(meshes), None)
    if len(meshes) != 1 or not isinstance(mesh, DeviceMesh) or mesh.size() == 1 or mesh.get_coordinate() is None:
        return None
    if is_rehearsing() or backend_of(mesh) == "fake" or any(_is_no_data(t._local_tensor) for t in tensors):
        return None
    return mesh


def _is_no_data(local: Tensor) -> bool:
    """Whether a local tensor is one of a graph, or only says what a view of a result under way would be."""
    return is_recorded(local) or local.is_meta


def _checked(run: Callable[[], Any], op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], mesh: DeviceMesh) -> Any:
    """The result of a call, after it was compared with that of the op on whole operands."""
    ranks = mesh.mesh.flatten().tolist()
    _agree(op, args, kwargs, ranks)
    plans: list[Plan] = []
    with torch.no_grad(), filled_memory():
        whole_args, whole_kwargs = _whole(args), _whole(kwargs)
        scale = _largest([*tensors_in([whole_args, whole_kwargs])])
        with observe(plans.append):
            result = run()
        expected: Any = None
        is_refused = True
        with suppress(Exception):  # whatever one device raises; the ranks' call did not
            expected = op(*whole_args, **whole_kwargs)
            is_refused = False
        if is_refused:
            return result
        actual = [_whole(result), *_written(op, args, kwargs, whole=True)]
        wrong = _difference(actual, [expected, *_written(op, whole_args, whole_kwargs, whole=False)], scale)
    verdicts = all_say("verify", wrong or "as on one device", ranks)
    if wrong or verdicts is False:
        plan = next((p for p in plans if p.schema.op is op), plans[-1] if plans else None)
        raise _wrong_rule(op, plan, wrong or "it is right on this rank, and another rank has another result")
    return result


def _agree(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """Raise on every rank unless all are about to check the same call."""
    if all_say("verify", f"{op_name(op)} {_shown([args, kwargs])} at {_line()}", ranks) is False:
        raise RankDisagreementError(
            asked=f"verify a call of {op_name(op)} at {_line()}",
            found="another rank verifies another call, since it has made more or fewer calls on this mesh",
            do="Make the same calls on MeshTensors on every rank while calls are verified, also those that send "
            "nothing, or do not verify this program.",
            differences=(),
        )


def _shown(value: Any) -> str:
    """Operands without their elements."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, Mapping):
        return f"[{', '.join(f'{name}={_shown(part)}' for name, part in value.items())}]"
    if isinstance(value, Tensor):
        return str(value._spec) if isinstance(value, MeshTensor) else f"{value.dtype} {tuple(value.shape)}"
    return repr(value)


def _line() -> str:
    frame = users_frame(inspect.currentframe())
    return "an unknown line" if frame is None else short_line(frame.f_code, frame.f_lasti)


@contextmanager
def filled_memory() -> Iterator[None]:
    """Fill memory that nobody writes with NaN, or the largest integer, while the context lasts."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kernels that add in any order
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _whole(value: Any) -> Any:
    """A value with a copy of its own for each tensor, whole where it lies on a mesh."""
    if isinstance(value, (list, tuple)):
        return [_whole(part) for part in value]
    if isinstance(value, Mapping):
        return {name: _whole(part) for name, part in value.items()}
    if isinstance(value, MeshTensor):
        _, runner = route(value._spec, [REPLICATE] * value._spec.mesh.ndim)
        local = value._local_tensor
        return local.clone() if runner is None else runner.run(local)
    return value.detach().clone() if isinstance(value, Tensor) else value


def _written(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any], *, whole: bool) -> list[Any]:
    """What a call has written, after it."""
    values = dict(zip((arg.name for arg in signature(op).args), args, strict=False)) | dict(kwargs)
    written = [values[arg.name] for arg in signature(op).args if (arg.written or arg.is_out) and arg.name in values]
    return [_whole(value) if whole else value for value in written]


# -- comparing -------------------------------------------------------------------------------------------------------


def _largest(tensors: Sequence[Any]) -> float:
    """The largest finite magnitude of some tensors, 1 if there is not one."""
    largest = 0.0
    for t in tensors:
        if isinstance(t, Tensor) and t.numel() and (t.is_floating_point() or t.is_complex()):
            finite = t.abs()[t.isfinite()]
            largest = max(largest, float(finite.max()) if finite.numel() else 0.0)
    return largest or 1.0


def _flat(value: Any) -> list[Any]:
    return [p for part in value for p in _flat(part)] if isinstance(value, (list, tuple)) else [value]


def _difference(actual: Any, expected: Any, scale: float) -> str:
    """What differs between the ranks' results and those of one device; empty if nothing does."""
    for i, (here, there) in enumerate(zip(_flat(actual), _flat(expected), strict=True)):
        if isinstance(here, Tensor) and isinstance(there, Tensor):
            wrong = _different_tensor(here, there, max(scale, _largest([there])))
            if wrong:
                return f"result {i} {wrong}"
    return ""


def _different_tensor(here: Tensor, there: Tensor, scale: float) -> str:
    if here.shape != there.shape or here.dtype != there.dtype:
        return f"is {here.dtype} {tuple(here.shape)}, and on one device {there.dtype} {tuple(there.shape)}"
    if here.is_floating_point() or here.is_complex():
        wide = torch.complex128 if here.is_complex() else torch.float64
        precision = here.real.dtype if here.is_complex() else here.dtype
        a, b = here.to(wide), there.to(wide)
        far = ~torch.isclose(a, b, rtol=0.0, atol=scale * _WITHIN.get(precision, 2.0**-2), equal_nan=True)
    else:
        far = here != there
    count = int(far.sum())
    if not count:
        return ""
    place = tuple(far.nonzero()[0].tolist())
    values = f"at {place} {here[place].item()}, on one device {there[place].item()}"
    return f"has {count} of {far.numel()} wrong elements: {values}"


def _wrong_rule(op: Op, plan: Plan | None, wrong: str) -> WrongRuleError:
    origin = "an unknown plugin" if plan is None else str(plan.entry.origin)
    rows = () if plan is None else tuple(sorted({str(strategy) for strategy in plan.strategies}))
    return WrongRuleError(
        asked=f"verify {op_name(op)} at {_line()} against one device",
        found=f"by the row {'; '.join(rows)} of {origin} {wrong}",
        do="Report it to the plugin. Until it is corrected, give the op another rule (shardwise.override, or the "
        "setting prefer).",
        op=op_name(op),
        plugin=origin,
        row="; ".join(rows),
        wrong=wrong,
    )
