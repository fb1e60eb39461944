"""A GPT training step on one device, with every tensor in a subclass that does nothing, over the same step without.

Run it with ``python tests/benchmarks/bench_floor.py [--rounds 7] [--calls 3] [--json FILE]``. The subclass unwraps its
operands, calls the op and wraps the results: no layouts, no plans, no collectives. So its time is a floor of what any
tensor subclass costs in eager mode, where Python sees each op, whatever a library knows of the step in advance.
``width`` 128 is the benchmark's model (:mod:`bench_step`) whole, 32 about what one of its four ranks computes.
"""

import click
import torch
from attrs import frozen
from gpt import batch, gpt_settings, training_step, written_out
from measuring import PLAIN, interleaved, line, options, report, settle
from torch import nn

from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.private_torch.dispatch import disabled_torch_function, new_wrapper, support_foreach

FLOOR = "do-nothing subclass"
WIDTHS = (32, 128)


@frozen(eq=False)
class Spec:
    """What torch's constructor of wrappers reads."""

    tensor_meta: TensorMeta


_specs = {}


def spec_of(tensor):
    key = tensor.shape, tensor.stride(), tensor.dtype
    spec = _specs.get(key)
    if spec is None:
        spec = _specs[key] = Spec(TensorMeta.of(tensor))
    return spec


class Floor(torch.Tensor):
    """A tensor that holds another one and passes every op on to it."""

    __slots__ = ("_local_tensor", "_spec")
    __torch_function__ = disabled_torch_function
    dispatches = 0

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        Floor.dispatches += 1
        local = [unwrapped(a) for a in args]
        result = func(*local, **{k: unwrapped(v) for k, v in kwargs.items()}) if kwargs else func(*local)
        if type(result) is torch.Tensor:
            return next((a for a, own in zip(args, local, strict=True) if own is result), None) or wrapped(result)
        return type(result)(map(wrapped, result)) if isinstance(result, (tuple, list)) else result


support_foreach(Floor)


def unwrapped(value):
    if type(value) is Floor:
        return value._local_tensor
    return [unwrapped(v) for v in value] if type(value) is list else value


def wrapped(value):
    return new_wrapper(Floor, value, spec_of(value), False) if type(value) is torch.Tensor else value


def step_of(settings, wrap):
    """A training step whose parameters, buffers and batch are ``wrap(tensor)``."""
    model = written_out(settings)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(wrap(parameter.detach())))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, wrap(buffer))
    return training_step(model, *map(wrap, batch(settings)), settings)


def measure(width, rounds, calls):
    settings = gpt_settings(width=width)
    plain, floor = step_of(settings, torch.clone), step_of(settings, wrapped)
    before = Floor.dispatches
    found, expected = floor()._local_tensor, plain()
    assert torch.equal(found, expected), "the subclass changes the numbers"
    dispatches = Floor.dispatches - before
    return {"width": width, "dispatches": dispatches, **interleaved({FLOOR: floor, PLAIN: plain}, rounds, calls)}


@click.command()
@options(calls=3)
def main(rounds, calls, json_file):
    """Print a table of medians and ratios."""
    torch.set_num_threads(1)
    settle()
    rows = [measure(width, rounds, calls) for width in WIDTHS]
    lines = [
        line(
            f"GPT training step, 4 layers, width {row['width']}, one device: a do-nothing subclass (floor)",
            "-",
            f"{row[FLOOR] / row[PLAIN]:.2f}x plain",
            met=None,
        )
        for row in rows
    ]
    report(rows, lines, json_file)


if __name__ == "__main__":
    main()
