"""Where local processes run: their devices, and the backend that connects them."""

from __future__ import annotations

import os

import torch

__all__ = ["local_backend", "local_device", "take_device"]


def local_device(name: str, world_size: int) -> str:
    """The device type for ``name``: ``cuda`` or ``cpu``. ``auto`` is ``cuda`` if every process has a GPU of its own.

    Raises :class:`ValueError` for ``cuda`` if torch finds no CUDA device.
    """
    if name == "auto":
        return "cuda" if torch.cuda.device_count() >= world_size else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device here")
    return name


def local_backend(device: str, world_size: int) -> str:
    """NCCL where every rank has a GPU of its own; gloo also carries CUDA tensors of ranks that share one."""
    own_gpu = device == "cuda" and torch.cuda.device_count() >= world_size
    return "nccl" if own_gpu else "gloo"


def take_device(device: str, rank: int) -> None:
    """Set this process's GPU by its rank on this host; ranks share GPUs where there are fewer GPUs than ranks."""
    if device == "cuda":
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
