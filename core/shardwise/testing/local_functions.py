"""Judge a local function: forward and gradients on simulated ranks, against the same function on one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwise.errors import ArgumentError, LocalPlacementError, LocalResultError, ShardingError
from shardwise.kernel.mesh import AbstractMesh, coordinates
from shardwise.kernel.placements import REPLICATE, Placement, check_placements, partial, shard, show_all
from shardwise.kernel.plurals import counted as number_of
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch import trees as pytree
from shardwise.tensor.local_function import Border, LocalFunction
from shardwise.tensor.local_gradients import counted, dual, refuse_without_gradient
from shardwise.tensor.local_places import AS_IT_LIES, normal, spread
from shardwise.testing.judge import difference
from shardwise.testing.partials import place

__all__ = ["LocalRefuted", "LocalReport", "check_local"]

Coordinate = tuple[int, ...]
Layout = tuple[Placement, ...]

_DOUBLE = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_DOUBLE |= {torch.complex64: torch.complex128}
_MOST_DIMS = 4  # of a result whose other placements are tried


class LocalRefuted(ShardingError, AssertionError):  # noqa: N818  it is a verdict
    """A local function gives another result or another gradient on ranks than on one device, or raises there.

    Fields: ``function``, ``what`` (``result 0``, ``the gradient of w``), ``placements``, ``mesh``, and ``fitting``: the
    placements under which a wrong result would be right.
    """


@frozen
class LocalReport:
    """What was compared: the ranks, the results and the gradients."""

    function: str
    ranks: int
    results: int
    gradients: int

    def __str__(self) -> str:
        return (
            f"{self.function} on {number_of(self.ranks, 'simulated rank')}: {number_of(self.results, 'result')} and "
            f"{number_of(self.gradients, 'gradient')} are those of one device"
        )


def check_local(  # noqa: PLR0913  # what a call and a mesh are
    fn: Callable[..., Any],
    *,
    inputs: Any = None,
    outputs: Any = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    mesh: Mapping[str, int] | Sequence[int] = (2, 2),
    names: Sequence[str] | None = None,
    whole: Callable[..., Any] | None = None,
    double: bool = True,
    rtol: float = 1e-9,
    seed: int = 0,
) -> LocalReport:
    """Call a local function on the parts that simulated ranks have of ``args``, and compare with one device.

    ``fn`` is what :func:`shardwise.local` returned, or a function with ``inputs`` and ``outputs`` as ``local`` takes
    them. ``args`` and ``kwargs`` have whole tensors. ``mesh`` is the shape of the mesh, with ``names`` for its dims, or
    ``{"dp": 2, "tp": 2}``.
    One device calls ``fn`` itself on the whole tensors, or ``whole`` where that is another function. Partial arguments
    are split at random, and so are the gradients that come back. Each result, and the gradient of each floating
    argument, must be that of one device.

    ``double`` computes in double precision, so that ``rtol``, relative to the largest value, leaves no room for
    another result. It needs no process group and takes milliseconds, so ``fn`` must not communicate.

    Raises :class:`LocalRefuted` with the first result or gradient that is wrong, and what :func:`shardwise.local`
    raises for placements that do not fit.
    """
    function = _described(fn, inputs, outputs)
    abstract = _abstract(mesh, names)
    trial = _Trial(function, abstract, whole or function.fn, rtol, seed)
    wide = _widened if double else _copied
    return trial.run(tuple(pytree.tree_map(wide, list(args))), pytree.tree_map(wide, dict(kwargs or {})))


def _abstract(mesh: Any, names: Sequence[str] | None) -> AbstractMesh:
    """The mesh of simulated ranks. Raises :class:`ArgumentError` for one that has none, on which anything is right."""
    if isinstance(mesh, Mapping):
        mesh, names = tuple(mesh.values()), tuple(mesh)
    if not isinstance(mesh, Sequence) or not mesh or not all(type(size) is int and size > 0 for size in mesh):
        raise ArgumentError(
            asked="check a local function",
            found=f"its argument 'mesh' is {mesh!r}",
            do='Give a shape with sizes above 0, as in (2, 2), or {"dp": 2, "tp": 2}.',
            argument="mesh",
        )
    return AbstractMesh(mesh, mesh_dim_names=None if names is None else tuple(names))


def _described(fn: Callable[..., Any], inputs: Any, outputs: Any) -> LocalFunction:
    known: LocalFunction | None = getattr(fn, "local_function", None)
    function = LocalFunction(fn, inputs, outputs) if known is None else known
    if known is not None:
        function = evolve(
            known,
            inputs=known.inputs if inputs is None else inputs,
            outputs=known.outputs if outputs is None else outputs,
        )
    if function.communicates:
        raise LocalPlacementError(
            asked=f"check {function.name} on simulated ranks",
            found=f"it communicates over {', '.join(map(str, function.communicates))}, and these ranks are one process",
            do="Check it on the ranks of a WorkerPool.",
        )
    return function


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _widened(value: Any) -> Any:
    copy = _copied(value)
    return copy.to(_DOUBLE.get(copy.dtype, copy.dtype)) if isinstance(copy, Tensor) else copy


def _lies(leaf: Any, entry: Any) -> Any:
    """Every tensor with an entry lies on the mesh, in any way."""
    if isinstance(leaf, Tensor) and entry is AS_IT_LIES:
        raise LocalPlacementError(
            asked="check a local function",
            found="its arguments may lie in any way",
            do="Say how they lie here: inputs=.",
        )
    return leaf if isinstance(leaf, Tensor) and entry is not None else None


@frozen
class _Trial:
    """One function on one mesh."""

    function: LocalFunction
    mesh: AbstractMesh
    whole: Callable[..., Any]
    rtol: float
    seed: int

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> LocalReport:
        leaves, tree = pytree.tree_flatten((args, dict(kwargs)))
        border = self.function.border(args, kwargs, self.mesh.mesh_dim_names or (), self.mesh.shape, _lies)
        generator = torch.Generator().manual_seed(self.seed)
        differentiated = [i for i, leaf in enumerate(leaves) if border.arguments[i] is not None and _is_inexact(leaf)]
        expected, mine = self._call(self.whole, leaves, tree, differentiated, "one device")
        placed = {
            i: place(leaf, self._spec(leaf, layout), generator)
            for i, (leaf, layout) in enumerate(zip(leaves, border.arguments, strict=True))
            if layout is not None
        }
        answers, operands = {}, {}
        for at in coordinates(self.mesh.shape):
            parts = [placed[i][at] if i in placed else leaf for i, leaf in enumerate(leaves)]
            answers[at], operands[at] = self._call(self.function.fn, parts, tree, differentiated, f"the rank at {at}")
        layouts = self._layouts(expected, answers)
        results = pytree.tree_leaves(expected)
        parts_of = {at: pytree.tree_leaves(answer) for at, answer in answers.items()}
        self._judge_results(results, parts_of, layouts)
        gradients = self._judge_gradients(border, results, mine, parts_of, operands, layouts, generator)
        return LocalReport(self.function.name, self.mesh.size(), sum(n is not None for n in layouts), gradients)

    def _call(
        self, fn: Callable[..., Any], leaves: Sequence[Any], tree: Any, differentiated: Sequence[int], who: str
    ) -> tuple[Any, dict[int, Tensor]]:
        """What a function returns for copies of its operands, and the copies that have gradients."""
        copies = list(map(_copied, leaves))
        operands = {i: copies[i].requires_grad_() for i in differentiated}
        args, kwargs = pytree.tree_unflatten(copies, tree)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self.seed)
            try:
                return fn(*args, **kwargs), operands
            except Exception as error:
                raise self._refuted("a call", f"{who} raises {type(error).__name__}: {error}") from error

    def _layouts(self, expected: Any, answers: Mapping[Coordinate, Any]) -> list[Layout | None]:
        """The layout of each result. The ranks must return as many as one device does."""
        asked = f"take the results of {self.function.name}"
        entry = normal(self.function.outputs, self.mesh.mesh_dim_names or (), self.mesh.ndim, asked)
        count = len(pytree.tree_leaves(expected))
        for at, answer in answers.items():
            own = len(pytree.tree_leaves(answer))
            if own != count:
                raise self._refuted("the results", f"the rank at {at} returns {own}, and one device {count}")
        layouts = spread(entry, expected, asked)
        for i, (value, layout) in enumerate(zip(pytree.tree_leaves(expected), layouts, strict=True)):
            if isinstance(value, Tensor) is (layout is None):
                raise LocalResultError(
                    asked=asked,
                    found=f"result {i} is {'a tensor' if layout is None else type(value).__name__}, and outputs= has "
                    f"{'no placements' if layout is None else 'placements'} for it",
                    do="Give placements for each tensor, None for anything else.",
                )
        return [
            None if layout is None else check_placements(layout, self.mesh.ndim, value.ndim)
            for value, layout in zip(pytree.tree_leaves(expected), layouts, strict=True)
        ]

    # -- judging --
    def _judge_results(
        self,
        results: Sequence[Any],
        parts_of: Mapping[Coordinate, Sequence[Any]],
        layouts: Sequence[Layout | None],
    ) -> None:
        for i, (expected, layout) in enumerate(zip(results, layouts, strict=True)):
            parts = {at: answer[i] for at, answer in parts_of.items()}
            if layout is None:
                different = next((at for at, value in parts.items() if type(value) is not type(expected)), None)
                if different is not None:
                    raise self._refuted(f"result {i}", f"the rank at {different} returns {parts[different]!r}")
                continue
            plain = {at: part.detach() for at, part in parts.items()}
            wrong = difference(plain, self._spec(expected, layout), expected.detach(), self.rtol, signs=False)
            if wrong:
                raise self._refuted(f"result {i}", wrong, layout, self._fitting(plain, expected.detach()))

    def _judge_gradients(
        self,
        border: Border,
        results: Sequence[Any],
        mine: Mapping[int, Tensor],
        parts_of: Mapping[Coordinate, Sequence[Any]],
        operands: Mapping[Coordinate, Mapping[int, Tensor]],
        layouts: Sequence[Layout | None],
        generator: torch.Generator,
    ) -> int:
        """Send random gradients back and compare those of the arguments; gives their number."""
        roots = [i for i, t in enumerate(results) if isinstance(t, Tensor) and t.requires_grad]
        if not roots or not mine:
            return 0
        name = self.function.name
        arguments: dict[int, Layout] = {i: layout for i in mine if (layout := border.arguments[i]) is not None}
        for i, layout in arguments.items():
            refuse_without_gradient(name, f"argument {border.names[i]}", layout)
        for i in roots:
            refuse_without_gradient(name, f"result {i}", layouts[i] or ())
        first = {i: torch.randn(results[i].shape, generator=generator).to(results[i].dtype) for i in roots}
        expected = _gradients([results[i] for i in roots], mine, [first[i] for i in roots])
        sent = {i: self._sent_back(first[i], layouts[i] or (), border, generator) for i in roots}
        by_rank = {}
        for at, answer in parts_of.items():
            reached = [i for i in roots if answer[i].requires_grad]
            by_rank[at] = _gradients([answer[i] for i in reached], operands[at], [sent[i][at] for i in reached])
        for i, layout in arguments.items():
            factor = counted(layout, self.mesh.shape)
            placements = dual(layout, border.same)
            parts = {at: gradients[i] * factor for at, gradients in by_rank.items()}
            wrong = difference(parts, self._spec(expected[i], placements), expected[i], self.rtol, signs=False)
            if wrong:
                raise self._refuted(f"the gradient of {border.names[i]}", wrong, placements)
        return len(arguments)

    def _sent_back(
        self, first: Tensor, layout: Layout, border: Border, generator: torch.Generator
    ) -> dict[Coordinate, Tensor]:
        """A gradient of a result as the gradients of its parts."""
        parts = place(first, self._spec(first, dual(layout, border.same)), generator)
        return {at: part / counted(layout, self.mesh.shape) for at, part in parts.items()}

    def _fitting(self, parts: Mapping[Coordinate, Tensor], expected: Tensor) -> list[Layout]:
        """The layouts under which these parts are what one device has."""
        if expected.ndim > _MOST_DIMS:
            return []
        single = [REPLICATE, partial("sum"), partial("avg"), *map(shard, range(expected.ndim))]
        fitting = [
            layout
            for layout in product(single, repeat=self.mesh.ndim)
            if not difference(dict(parts), self._spec(expected, layout), expected, self.rtol, signs=False)
        ]
        # A sum over one mesh dim and an average over another may be a sum over either.
        return [layout for layout in fitting if partial("avg") not in layout] or fitting

    def _spec(self, tensor: Tensor, layout: Sequence[Placement]) -> TensorSpec:
        meta = TensorMeta.contiguous(tensor.shape, tensor.dtype)
        return TensorSpec(self.mesh, check_placements(layout, self.mesh.ndim, tensor.ndim), meta)

    def _refuted(self, what: str, found: str, layout: Layout = (), fitting: Sequence[Layout] = ()) -> LocalRefuted:
        shape = "x".join(map(str, self.mesh.shape))
        lies = f" {show_all(layout)}" if layout else ""
        do = "Correct the function, or what inputs= and outputs= say."
        if fitting:
            do = f"The parts are right under {' or '.join(map(show_all, fitting))}: say so in outputs=."
        return LocalRefuted(
            asked=f"call {self.function.name} on the parts of a {shape} mesh",
            found=f"{what}{lies}: {found}",
            do=do,
            function=self.function.name,
            what=what,
            placements=layout,
            mesh=shape,
            fitting=tuple(fitting),
        )


def _gradients(roots: Sequence[Tensor], operands: Mapping[int, Tensor], first: Sequence[Tensor]) -> dict[int, Tensor]:
    """The gradients of some operands, zeros where there are none."""
    if not roots:
        return {i: torch.zeros_like(t) for i, t in operands.items()}
    gradients: Sequence[Tensor | None] = torch.autograd.grad(roots, list(operands.values()), first, allow_unused=True)
    return {
        i: torch.zeros_like(t) if gradient is None else gradient
        for (i, t), gradient in zip(operands.items(), gradients, strict=True)
    }


def _is_inexact(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
