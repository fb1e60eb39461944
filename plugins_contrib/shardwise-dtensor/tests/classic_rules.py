"""Custom ops with rules as people wrote them for DTensor. Only the imports of its own names are shardwise_dtensor's."""

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._common_rules import einop_rule
from torch.distributed.tensor._ops._einsum_strategy import gen_einsum_strategies
from torch.distributed.tensor._ops.utils import (
    expand_to_full_mesh_op_strategy,
    generate_redistribute_costs,
    is_tensor_shardable,
)
from torch.library import custom_op

from shardwise_dtensor import (
    DTensorSpec,
    OpSchema,
    OpSpec,
    OpStrategy,
    OutputSharding,
    PlacementStrategy,
    RuntimeSchemaInfo,
    TupleStrategy,
    register_op_strategy,
    register_prop_rule,
)


def define(name, schema, function, fake, writes=()):
    custom_op(f"classic::{name}", mutates_args=writes, schema=schema)(function)
    torch.library.register_fake(f"classic::{name}", fake)
    return getattr(torch.ops.classic, name).default


project = define(
    "project", "(Tensor x, Tensor w) -> Tensor", lambda x, w: x @ w, lambda x, w: x.new_empty(x.shape[0], w.shape[1])
)
squash = define(
    "squash", "(Tensor x, float top) -> Tensor", lambda x, top: x.clamp(-top, top), lambda x, top: torch.empty_like(x)
)
blend = define("blend", "(Tensor x, Tensor y) -> Tensor", lambda x, y: x + 2 * y, lambda x, y: torch.empty_like(x))
narrow = define(
    "narrow", "(Tensor x, int dim) -> Tensor", lambda x, dim: x.softmax(dim), lambda x, dim: torch.empty_like(x)
)
outer = define("outer", "(Tensor x, Tensor y) -> Tensor", torch.outer, lambda x, y: x.new_empty(x.shape[0], y.shape[0]))
pieces = define(
    "pieces",
    "(Tensor x) -> (Tensor, Tensor)",
    lambda x: (x.sum(0), x * 2),
    lambda x: (x.new_empty(x.shape[1]), torch.empty_like(x)),
)
grow_ = define(
    "grow_",
    "(Tensor(a!)[] xs, Tensor by) -> ()",
    lambda xs, by: [x.mul_(by) for x in xs] and None,
    lambda xs, by: None,
    writes=("xs",),
)


# -- strategies: (mesh, op_schema) as in older releases, (op_schema) as in newer ------------------------------------


@register_op_strategy(project)
def project_strategy(mesh, op_schema: OpSchema) -> OpStrategy:
    x_strategy, w_strategy = op_schema.args_schema
    found = gen_einsum_strategies("mk,kn->mn", mesh)
    kept = []
    for choice in found.strategies:
        x_spec, w_spec = choice.input_specs
        if is_tensor_shardable(x_strategy.shape, x_spec) and is_tensor_shardable(w_strategy.shape, w_spec):
            choice.redistribute_cost = [
                generate_redistribute_costs(x_strategy, x_spec),
                generate_redistribute_costs(w_strategy, w_spec),
            ]
            kept.append(choice)
    found.strategies = kept
    return found


@register_op_strategy(squash, schema_info=RuntimeSchemaInfo(static_argnum=1))
def pointwise(op_schema: OpSchema) -> OpStrategy:
    followed = op_schema.args_schema[0]
    found = []
    for choice in followed.strategies:
        there = choice.output_spec
        target = DTensorSpec(there.mesh, tuple(Replicate() if p.is_partial() else p for p in there.placements))
        found.append(OpSpec(target, [target], [generate_redistribute_costs(followed, target)]))
    assert op_schema.args_schema[1] > 0
    return OpStrategy(found)


@register_op_strategy(blend)
def linear_pointwise(mesh, op_schema):
    x, y = op_schema.args_schema
    there = x.strategies[0].output_spec
    linear = tuple(Replicate() if p.is_partial() and not p.is_partial("sum") else p for p in there.placements)
    wanted = DTensorSpec(mesh, linear, tensor_meta=there.tensor_meta)
    costs = [generate_redistribute_costs(x, wanted), generate_redistribute_costs(y, wanted)]
    return OpStrategy([PlacementStrategy(output_specs=wanted, input_specs=(wanted, wanted), redistribute_cost=costs)])


@register_op_strategy(narrow, schema_info=RuntimeSchemaInfo(1))
def one_dim_stays_whole(op_schema):
    x, dim = op_schema.args_schema
    rows = [[Replicate(), Replicate()]]
    rows += [[Shard(d), Shard(d)] for d in range(x.ndim) if d != dim % x.ndim]
    return expand_to_full_mesh_op_strategy(x.mesh, op_schema, rows)


@register_op_strategy(pieces)
def sum_and_double(op_schema):
    (x,) = op_schema.args_schema
    rows = [[Replicate(), Replicate(), Replicate()], [Partial(), Shard(0), Shard(0)], [Shard(0), Shard(1), Shard(1)]]
    return expand_to_full_mesh_op_strategy(x.mesh, op_schema, rows, input_index=2)


@register_op_strategy(grow_, schema_info=RuntimeSchemaInfo(needs_pytree=True))
def each_by_itself(op_schema):
    xs, by = op_schema.args_schema
    children = []
    for x in xs.children:
        there = x.strategies[0].output_spec
        if any(p.is_partial() and not p.is_partial("sum") for p in there.placements):
            raise RuntimeError("in place on a tensor that is partial otherwise than as a sum")
        whole = DTensorSpec(
            there.mesh, tuple(Replicate() for _ in there.placements), by.strategies[0].output_spec.tensor_meta
        )
        costs = [[0.0], generate_redistribute_costs(by, whole)]
        children.append(OpStrategy([OpSpec(None, [there, whole], costs)]))
    return TupleStrategy(children)


# -- propagation rules -----------------------------------------------------------------------------------------------


@register_prop_rule(outer)
def outer_rule(op_schema: OpSchema) -> OutputSharding:
    x, y = op_schema.args_schema
    placements = [p for spec in (x, y) for p in spec.placements]
    split = [[not p.is_replicate() for p in spec.placements] for spec in (x, y)]
    if any(p.is_partial() for p in placements) or any(map(all, zip(*split, strict=True))) or 2 in map(sum, split):
        whole = [DTensorSpec(s.mesh, (Replicate(),) * s.mesh.ndim, tensor_meta=s.tensor_meta) for s in (x, y)]
        return OutputSharding(None, schema_suggestions=[OpSchema(op_schema.op, tuple(whole), {})])
    return einop_rule("i,j->ij", op_schema)


RIGHT = (project, squash, blend, narrow, pieces, grow_, outer)


# -- planted wrong ones ----------------------------------------------------------------------------------------------

wrong_sum = define("wrong_sum", "(Tensor x) -> Tensor", lambda x: x.sum(1), lambda x: x.new_empty(x.shape[0]))
wrong_follow = define("wrong_follow", "(Tensor x) -> Tensor", torch.relu, torch.empty_like)
wrong_rule = define("wrong_rule", "(Tensor x) -> Tensor", lambda x: x.softmax(-1), torch.empty_like)


@register_op_strategy(wrong_sum)
def not_partial(op_schema):
    (x,) = op_schema.args_schema
    return expand_to_full_mesh_op_strategy(x.mesh, op_schema, [[Replicate(), Shard(1)], [Replicate(), Replicate()]])


@register_op_strategy(wrong_follow)
def follows_sums_too(op_schema):
    there = op_schema.args_schema[0].strategies[0].output_spec
    return OpStrategy([OpSpec(there, [there], [[0.0]])])


@register_prop_rule(wrong_rule)
def softmax_of_pieces(op_schema):
    return OutputSharding(op_schema.args_schema[0])
