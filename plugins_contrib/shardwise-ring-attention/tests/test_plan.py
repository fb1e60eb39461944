"""Context parallelism by a plan: the recipe of an expert, the plan that is found beside it, and the same on ranks."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from attrs import evolve

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.comm import events
from shardwise.demo.large import WithLoss
from shardwise.demo.model import GPT
from shardwise.program.plan_file import parse
from shardwise.testing import mesh

PLANS = Path(__file__).parents[3] / "tests" / "benchmarks" / "plans"
#: By recipe, the mesh, its names, and where ids of one sequence lie.
RECIPES = {
    "context-cp": ((4,), ("cp",), (Shard(1),)),
    "context-fsdp-cp": ((4,), ("cp",), (Shard(1),)),
    "context-cp-tp": ((2, 2), ("cp", "tp"), (Shard(1), Replicate())),
}
TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def model_and_ids(context):
    torch.manual_seed(0)
    model = WithLoss(GPT(layers=1, width=64, heads=2, context=context)).double()
    return model, [torch.randint(256, (1, context)) for _ in range(2)]


def step(on, context, places):
    """The step with its parameters whole, and its positions sharded."""
    model, ids = model_and_ids(context)
    sw.distribute_module(model, on, src_data_rank=None)
    return model, [sw.distribute_tensor(x, on, places, src_data_rank=None) for x in ids]


def planned(recipe, context, **options):
    shape, names, places = RECIPES[recipe]
    return sw.plan(partial(step, context=context, places=places), shape, names, **options)


def read(recipe):
    return parse((PLANS / f"{recipe}.plan").read_text(), recipe)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plan_is_no_dearer_than_the_ring_of_an_expert(recipe):
    made = planned(recipe, 4096, recipes={recipe: read(recipe)})
    assert made.recipe_costs[recipe] is not None
    assert made.cost <= made.recipe_costs[recipe]
    assert made.differences == ()


def test_a_recipe_that_holds_a_move_of_an_op_that_is_not_there_does_not_fit():
    file = read("context-cp")
    moves = [evolve(line, op="aten.no_such_op.default") for line in file.moves]
    made = planned("context-cp", 64, recipes={"other": evolve(file, moves=moves)})
    assert made.recipe_costs == {"other": None}


def losses_and_gradients(model, ids, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(model(*ids))
        losses[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in losses], [p.grad for p in model.parameters()]


def trains_as_one_device(path, recipe, context):
    from shardwise.engine import decided  # its state is that of the rank, and not of the process that sends this

    shape, names, places = RECIPES[recipe]
    on = mesh(shape, names)
    one, ids = model_and_ids(context)
    many = copy.deepcopy(one)
    try:
        sw.distribute_module(many, on, path)
        moved = []
        with events.observe(moved.append):
            found = losses_and_gradients(many, [sw.distribute_tensor(x, on, places) for x in ids])
        assert "shift" in {event.kind for event in moved}
        assert decided.in_force.known > 0
    finally:
        decided.use_decisions(None)
    for expected, mine in zip(losses_and_gradients(one, ids), found, strict=True):
        for a, b in zip(expected, mine, strict=True):
            torch.testing.assert_close(b.full_tensor(), a, **TIGHT)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_plan_of_a_ring_trains_as_one_device(pool, tmp_path, recipe):
    made = planned(recipe, 256, keep=read(recipe))
    assert made.differences == ()
    assert {use.phase for use in made.collectives if use.kind == "shift"} == {"forward", "backward"}
    made.save(tmp_path / "context.plan")
    pool.run(trains_as_one_device, str(tmp_path / "context.plan"), recipe, 256, timeout=120.0)
