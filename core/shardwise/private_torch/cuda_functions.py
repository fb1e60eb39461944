"""``torch.cuda``, answered for a card that is described, where there is no CUDA device.

Programs and torch's own Python code ask whether there is a device, which one, for its streams and for the state of its
generator: autocast, ``GradScaler``, activation checkpointing, timers. On a build without CUDA these functions raise.
While the context lasts they answer as one idle device does. No public function replaces them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Self

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.private_torch.cuda_choices import Card
from shardwise.private_torch.fake import added, replaced, standing_in

__all__ = ["answering_for"]

_STATE_BYTES = 16  # a CUDA generator's state: its seed and its Philox offset, eight bytes each


@contextmanager
def answering_for(card: Card) -> Iterator[None]:
    """A context in which ``torch.cuda`` answers for one card that is idle and has no memory in use."""
    answers = {**_device_answers(card), **_stream_answers(), **_memory_answers(card), **_generator_answers()}
    cudnn: Any = getattr(torch.backends.cudnn, "m", torch.backends.cudnn)  # what stands in the module's place holds it
    try:
        with (
            standing_in(),
            replaced(torch.cuda, **answers),
            replaced(torch.cuda.random, _lazy_init=_nothing),
            # Torch's own reads a stream of the device, for which another object stands.
            added(torch.Tensor, record_stream=_nothing),
            # Torch decides by it how it makes fake tensors of numbers. The device that answers has no kernels.
            replaced(FakeTensorMode, avoid_device_init=True),
            # Recurrent layers ask whether to pack their weights for cuDNN, and are warned that there is not one.
            replaced(cudnn, is_acceptable=lambda _tensor: False),
            replaced(torch.accelerator, current_stream=lambda _device=None: _STREAM, synchronize=_doing_nothing()),
        ):
            yield
    finally:
        _forget_names()


def _forget_names() -> None:
    """Have dynamo list torch's functions again, if it listed them meanwhile: it knows each by its identity."""
    rules = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:
        rules.get_torch_obj_rule_map.cache_clear()


def _nothing(*_: Any, **__: Any) -> None:
    """Do nothing: the device is idle."""


def _doing_nothing() -> Any:
    """A function of its own: dynamo tells torch's functions apart by their identity."""
    return lambda *_, **__: None


def _device_answers(card: Card) -> dict[str, Any]:
    major, minor = card.capability
    properties = SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.memory,
        multi_processor_count=card.processors,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )
    return {
        "_initialized": True,
        "_lazy_init": _doing_nothing(),
        "_lazy_call": lambda call, **_: call(),
        "_exchange_device": lambda _device: 0,
        "_maybe_exchange_device": lambda _device: 0,
        "init": _doing_nothing(),
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": _doing_nothing(),
        "get_device_capability": lambda _device=None: card.capability,
        "get_device_name": lambda _device=None: card.name,
        "get_device_properties": lambda _device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: major >= 8 or including_emulation,  # noqa: PLR2004  # sm80
        "is_tf32_supported": lambda: major >= 8,  # noqa: PLR2004  # sm80
    }


# -- streams ---------------------------------------------------------------------------------------------------------


class _Event:
    """An event on an idle device: it is past."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def elapsed_time(self, _end: Any) -> float:
        return 0.0


class _Stream:
    """A stream of an idle device."""

    device = torch.device("cuda", 0)
    device_index = stream_id = cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    synchronize = wait_event = wait_stream = _nothing

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> Any:
        return _Event() if event is None else event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


_STREAM = _Stream()


@contextmanager
def _on_stream(_stream: Any) -> Iterator[None]:
    yield


def _stream_answers() -> dict[str, Any]:
    return {
        "Stream": _Stream,
        "Event": _Event,
        "stream": _on_stream,
        "set_stream": _doing_nothing(),
        "current_stream": lambda _device=None: _STREAM,
        "default_stream": lambda _device=None: _STREAM,
        "synchronize": _doing_nothing(),
        "is_current_stream_capturing": lambda: False,
    }


def _memory_answers(card: Card) -> dict[str, Any]:
    names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    return {
        **{name: lambda _device=None: 0 for name in names},
        "empty_cache": _doing_nothing(),
        "reset_peak_memory_stats": _doing_nothing(),
        "ipc_collect": _doing_nothing(),
        "mem_get_info": lambda _device=None: (card.memory, card.memory),
    }


# -- the generator ---------------------------------------------------------------------------------------------------


def _generator_answers() -> dict[str, Any]:
    """Functions of the default generator. Kernels without data draw nothing, so its offset stays where it is."""
    state = SimpleNamespace(seed=0, offset=0)

    def seed(number: int) -> None:
        state.seed, state.offset = int(number) % (1 << 64), 0

    def get_state(_device: Any = None) -> torch.Tensor:
        data = state.seed.to_bytes(8, "little") + state.offset.to_bytes(8, "little")
        return torch.tensor(list(data), dtype=torch.uint8, device="cpu")

    def set_state(_new: torch.Tensor, _device: Any = None) -> None:
        """A state without data: what it holds is not known, and nothing is drawn by it."""

    return {
        "manual_seed": seed,
        "manual_seed_all": seed,
        "initial_seed": lambda: state.seed,
        "get_rng_state": get_state,
        "set_rng_state": set_state,
    }
