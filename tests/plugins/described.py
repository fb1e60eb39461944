"""What a rule says of a call: for the tests of all op families. Operands are replicated over a mesh of two."""

import torch

from shardwise import Partial, Replicate
from shardwise.discovery.process import default_registry
from shardwise.kernel.mesh import AbstractMesh
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.spec import TensorSpec
from shardwise.kernel.tensor_meta import TensorMeta
from shardwise.planning.results import output_metas
from shardwise.planning.strategies import make_call


def spec_of(value):
    """The spec of a tensor, also in lists; other values stay."""
    if isinstance(value, list):
        parts = list(map(spec_of, value))
        return tuple(parts) if any(isinstance(part, TensorSpec) for part in parts) else parts
    if isinstance(value, torch.Tensor):
        return TensorSpec(AbstractMesh((2,)), [Replicate()], TensorMeta.of(value))
    return value


def call_of(op, *args, **kwargs):
    """The rule of an op, and a call as the rule sees it."""
    rule = default_registry().lookup(op).rule
    named = {name: spec_of(value) for name, value in kwargs.items()}
    schema = OpSchema.of(op, *map(spec_of, args), static=rule.static, **named)
    metas = output_metas(op, schema.values, rule.meta)
    unknown = (None,) * sum(r.is_tensor for r in schema.signature.results)
    return rule, make_call(rule, schema, unknown if metas is None else metas)


def rows_of(op, *args, **kwargs):
    """The rows of a call."""
    rule, call = call_of(op, *args, **kwargs)
    return rule.rows(call)


def takes_partial(row):
    """Whether a row has a partial operand."""
    return any(isinstance(p, Partial) for p in row.inputs)


def empty(*shape, dtype=torch.float32):
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")
