"""The recipes of every package that is installed."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
from zoo_trial import Recipe

PACKAGES = ("torch", "torchvision", "timm", "transformers", "diffusers", "peft", "torch_geometric")
_declared: list[torch.library.Library] = []


def installed() -> list[str]:
    return [package for package in PACKAGES if find_spec(package) is not None]


@cache
def recipes_of(package: str) -> dict[str, Recipe]:
    """By ``package/name``. Imports the package."""
    if package != "torch":
        declare_torchvision()
    module = import_module(f"zoo_{package}")
    return {f"{package}/{recipe.name}": recipe for recipe in module.recipes}


def declare_torchvision() -> None:
    """Torchvision cannot be imported without its kernels, which a wheel for another torch cannot load; models run."""
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None or _declared:
        return
    try:
        for kernels in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(kernels))
    except OSError:
        pass
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
