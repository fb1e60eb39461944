"""One model of the zoo, trained on one device and on a mesh, and the comparison."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.testing import mesh as mesh_of

BATCH = 4
STEPS = 2
TOLERANCE = 1e-9
TOLERANCE_FLOAT32 = 3e-5
"""For models that calculate a part in float32, whatever their weights are: losses, norms, rotary tables."""

ROUNDINGS = 100.0
"""How often more than one rounding of every parameter the roundings of a run may matter; see :func:`sensitivity`."""

EPS = 1e-4
"""AdamW's; its default would make steps of the rounding errors in gradients that are zero (a bias before a norm)."""


@frozen
class Recipe:
    """How to make a model and its batch: positional arguments, or a mapping of keywords."""

    name: str
    package: str
    make: Any


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The floating tensors of what a model returned, in a fixed order."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point() or output.is_complex():
            yield output
    elif isinstance(output, Mapping):
        for key in output:
            yield from tensors_in(output[key])
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors_in(part)


def loss_of(output: Any) -> torch.Tensor:
    """The model's own loss where it has one; else a number that no layer norm makes constant."""
    own = getattr(output, "loss", None)
    if isinstance(own, torch.Tensor):
        return own
    total = 0.0
    for tensor in tensors_in(output):
        if tensor.requires_grad:
            real = tensor.real if tensor.is_complex() else tensor
            slope = torch.linspace(-1, 1, real.shape[-1] if real.ndim else 1, dtype=torch.float64, device=real.device)
            total = total + (real * slope).mean() + 0.1 * real.square().mean()
    return total


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def made(recipe: Recipe, device: str = "cpu") -> tuple[nn.Module, Any]:
    """The same on every rank and in the parent, made on the host and moved to the device."""
    torch.manual_seed(0)
    model, batch = recipe.make()
    model = without_dropout(model).double().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # some start as zeros and ones, which hide what is wrong
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_((0.02 * noise).to(parameter.dtype))
    doubles = mapped(lambda t: t.double() if t.is_floating_point() else t, batch)
    return model.to(device), mapped(lambda t: t.to(device), doubles)


def mapped(fn: Any, batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return fn(batch)
    if isinstance(batch, Mapping):
        return {key: mapped(fn, value) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(mapped(fn, value) for value in batch)
    return batch


def trained(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Two AdamW steps: losses, the last gradients, parameters and buffers, by name."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.1, eps=EPS
    )
    results = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = loss_of(output)
        loss.backward()
        results[f"loss {step}"] = loss.detach()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                results[f"grad {step} {name}"] = parameter.grad.clone()
        optimizer.step()
    results |= {f"parameter {name}": parameter.detach() for name, parameter in model.named_parameters()}
    results |= {f"buffer {name}": buffer for name, buffer in model.named_buffers()}
    return results


@frozen
class Layout:
    """How a model lies on a mesh: ``places`` gives the placements of its parameters on one mesh dim, by name.

    They lie so on the last mesh dim, and whole on the others. The batch is sharded over the first mesh dim, unless
    ``batch_whole``.
    """

    mesh_shape: tuple[int, ...]
    places: Callable[[nn.Module, int], dict[str, Shard]]
    batch_whole: bool = False
    library: str = "shardwise"

    def placements(self, place: Shard | None) -> list[Any]:
        """Of a parameter."""
        return [Replicate()] * (len(self.mesh_shape) - 1) + [place or Replicate()]

    def batch_placements(self, tensor: torch.Tensor) -> list[Any]:
        is_batch = tensor.ndim > 0 and tensor.shape[0] == BATCH and not self.batch_whole
        return [Shard(0) if is_batch else Replicate(), *[Replicate()] * (len(self.mesh_shape) - 1)]


def column_row(model: nn.Module, ranks: int) -> dict[str, Shard]:
    """Weights of two and more dims by column and by row in turn, where the ranks divide the dim."""
    places = {}
    turn = 0
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2:
            order = (turn % 2, 1 - turn % 2)
            dim = next((d for d in order if parameter.shape[d] and parameter.shape[d] % ranks == 0), None)
            if dim is not None:
                places[name] = Shard(dim)
                turn += 1
    return places


def every_shard_0(model: nn.Module, ranks: int) -> dict[str, Shard]:
    """As FSDP: each parameter over all ranks, uneven where their number does not divide it."""
    return {name: Shard(0) for name, parameter in model.named_parameters() if parameter.ndim and ranks}


def all_whole(model: nn.Module, ranks: int) -> dict[str, Shard]:
    """As DDP."""
    return {}


LAYOUTS = {
    "data": Layout((4,), all_whole),
    "tp": Layout((4,), column_row, batch_whole=True),
    "dp x tp": Layout((2, 2), column_row),
    "fsdp": Layout((4,), every_shard_0),
    "DTensor dp x tp": Layout((2, 2), column_row, library="DTensor"),
    "DTensor fsdp": Layout((4,), every_shard_0, library="DTensor"),
}
OURS = tuple(name for name, layout in LAYOUTS.items() if layout.library == "shardwise")


def on_mesh(recipe: Recipe, layout: Layout, device: str = "cpu") -> dict[str, torch.Tensor]:
    """What training on the mesh of a layout gave, whole. Every rank calls this."""
    mesh = mesh_of(layout.mesh_shape, device_type=device)
    model, batch = made(recipe, device)
    places = layout.places(model, layout.mesh_shape[-1])
    if layout.library == "DTensor":
        return on_mesh_of_dtensors(model, batch, mesh, places, layout)
    by_name = {name.replace("[", "[[]"): layout.placements(place) for name, place in places.items()}
    sw.distribute_module(model, mesh, by_name)
    results = trained(model, mapped(lambda t: sw.distribute_tensor(t, mesh, layout.batch_placements(t)), batch))
    return {name: t.full_tensor() if isinstance(t, sw.MeshTensor) else t for name, t in results.items()}


def on_mesh_of_dtensors(
    model: nn.Module, batch: Any, mesh: DeviceMesh, places: dict[str, Shard], layout: Layout
) -> dict[str, torch.Tensor]:
    """The same with torch's DTensor, which takes plain tensors as replicated where ``implicit_replication`` says so."""
    from torch.distributed.tensor import DTensor, debug, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication

    # A call that failed leaves its mask in what is cached, and the next model would fail for it.
    debug._clear_python_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()

    with torch.no_grad():
        by_tensor = {
            parameter: nn.Parameter(
                distribute_tensor(parameter, mesh, layout.placements(places.get(name))), parameter.requires_grad
            )
            for name, parameter in model.named_parameters()
        }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = by_tensor[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = distribute_tensor(buffer, mesh, layout.placements(None))
    with implicit_replication():
        results = trained(model, mapped(lambda t: distribute_tensor(t, mesh, layout.batch_placements(t)), batch))
        return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in results.items()}


class DtypesSeen(TorchDispatchMode):
    """Records whether an op gave float32. AdamW counts steps in float32 without dims: not those."""

    def __init__(self):
        super().__init__()
        self.float32 = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, list | tuple) else [result]
        self.float32 |= any(isinstance(r, torch.Tensor) and r.ndim > 0 and r.dtype == torch.float32 for r in results)
        return result


def sensitivity(recipe: Recipe, expected: Mapping[str, torch.Tensor], device: str = "cpu") -> dict[str, float]:
    """How far each result goes, relative to its largest element, when every parameter is rounded once more.

    Batch norm over four samples in many layers turns one rounding into differences of 1e-9 and more: a mesh, which adds
    in another order, cannot be nearer to one device than that.
    """
    model, batch = made(recipe, device)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(2, parameter.shape, generator=generator).bool().to(device)
            away = torch.where(up, torch.full_like(parameter, torch.inf), torch.full_like(parameter, -torch.inf))
            parameter.copy_(torch.nextafter(parameter, away) if parameter.is_floating_point() else parameter)
    rounded = trained(model, batch)
    return {name: gap / scale for name, (gap, scale) in gaps(expected, rounded).items() if scale}


def gaps(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """For each result that both have in one shape: the largest difference and the largest element, of finite ones."""
    found = {}
    for name in one.keys() & other.keys():
        here, there = one[name].detach(), other[name].detach()
        if here.shape != there.shape or not here.isfinite().any():
            continue
        wide = torch.complex128 if here.is_complex() else torch.float64
        gap = (here.to(wide) - there.to(wide)).abs()[here.isfinite()].max().item()
        found[name] = gap, here.to(wide).abs().nan_to_num(posinf=0).max().item()
    return found


def differences(
    expected: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    tolerance: float,
    sensitive: Mapping[str, float] | None = None,
) -> list[str]:
    """What differs, each with how much, relative to the largest element; empty if all is equal."""
    measured = gaps(expected, actual)
    found = [f"{name}: on one side only" for name in sorted(expected.keys() ^ actual.keys())]
    for name in expected.keys() & actual.keys():
        one, other = expected[name].detach(), actual[name].detach()
        if one.shape != other.shape or one.dtype != other.dtype:
            found.append(f"{name}: {one.dtype} {tuple(one.shape)} became {other.dtype} {tuple(other.shape)}")
            continue
        if one.numel() == 0 or torch.equal(one, other):
            continue
        largest, scale = measured.get(name, (0.0, 0.0))
        allowed = max(tolerance, ROUNDINGS * (sensitive or {}).get(name, 0.0)) * scale + tolerance / 100
        if not torch.equal(one.isfinite(), other.isfinite()) or largest > allowed:
            found.append(f"{name}: {largest:.2g} of {scale:.2g}, {allowed:.2g} allowed")
    return sorted(found)


def compared_on_rank(recipe: Recipe, layout: str, expected_path: str, device: str = "cpu") -> tuple[list[str], bool]:
    """The differences that one rank sees, and whether there are none only because roundings matter much."""
    tolerance, sensitive, expected = torch.load(expected_path, weights_only=True)
    actual = on_mesh(recipe, LAYOUTS[layout], device)
    found = differences(expected, actual, tolerance, sensitive)
    return found, not found and bool(differences(expected, actual, tolerance))
