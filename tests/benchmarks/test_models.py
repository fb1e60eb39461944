"""The models of models.py at tiny sizes: their recipes fit, plans cost no more, and numbers are those of one device."""

from __future__ import annotations

from functools import partial

import models
import pytest
import torch
from recipes import recipes

import shardwise as sw
from shardwise import Replicate
from shardwise.testing import mesh

TINY = {
    "Llama": ((2, 32, 8, 4, 48, 32, 16), partial(models.words_in, 32, 4, 16)),
    "EncoderDecoder": ((1, 16, 4, 32, 8), partial(models.pairs_in, 32, 4, 8)),
    "VisionTransformer": ((1, 16, 4, 16, 4, 8), partial(models.images_in, 4, 16, 8)),
    "ResNet": (((1, 1), 8, 8), partial(models.images_in, 4, 32, 8)),
    "UNet": ((16, 2, 4), partial(models.noisy_in, 4, 16)),
    "Recommendation": ((3, 16, 8, 5), partial(models.clicks_in, 8, 3, 16, 5)),
    "GroupedExperts": ((2, 16, 32, 4), partial(models.vectors_in, 4, 8, 16)),
}
ON = {
    "Llama": ("tp", "dp-tp"),
    "EncoderDecoder": ("dp-tp",),
    "VisionTransformer": ("dp", "dp-tp"),
    "ResNet": ("dp", "dp-tp"),
    "UNet": ("dp-tp",),
    "Recommendation": ("dp",),
    "GroupedExperts": ("dp-tp",),
}
EVERYDAY = ("Recommendation", "dp")
SAMPLE = [pytest.mark.slow, pytest.mark.sample]
CASES = [
    pytest.param(model, names, id=f"{model}-{names}", marks=() if (model, names) == EVERYDAY else SAMPLE)
    for model, every in ON.items()
    for names in every
]
#: Products of groups have no kernel for float64.
SINGLE = {"GroupedExperts"}


def names_of(text):
    return tuple(text.split("-"))


def shape_of(text, ranks=4):
    return (ranks,) if len(names_of(text)) == 1 else (2, ranks // 2)


def tiny(name):
    """A model and its batch, the same ones in every process."""
    torch.manual_seed(0)
    sizes, given = TINY[name]
    model, inputs = getattr(models, name)(*sizes), given()
    if name in SINGLE:
        return model, inputs
    return model.double(), tuple(t.double() if t.is_floating_point() else t for t in inputs)


def program(name, on):
    return models.placed(on, *tiny(name))


def known(name, names):
    return recipes(f"models:{name}", names_of(names))


@pytest.mark.parametrize(("name", "names"), CASES)
def test_a_plan_costs_no_more_than_the_recipes(name, names):
    files = known(name, names)
    planned = sw.plan(partial(program, name), shape_of(names, 8), names_of(names), recipes=files)
    assert planned.recipe_costs.keys() == files.keys() != set()
    assert all(cost is not None for cost in planned.recipe_costs.values()), planned.recipe_costs
    assert planned.cost <= min(planned.recipe_costs.values())
    assert planned.differences == ()
    parameters = [parameter for parameter, _ in tiny(name)[0].named_parameters()]
    for file in files.values():
        for parameter in parameters:
            assert file.placements_of(parameter) is not None


@pytest.mark.parametrize(
    ("name", "names", "part"),
    [pytest.param("VisionTransformer", "dp", 0.95, marks=SAMPLE), pytest.param("Llama", "dp-tp", 0.75, marks=SAMPLE)],
)
def test_within_a_limit_a_plan_costs_no_more_than_the_recipes(name, names, part):
    """The recipe keeps the limit, and what is cheapest without one does not."""
    planned = partial(sw.plan, partial(program, name), shape_of(names), names_of(names))
    limit = int(planned().rehearsal.memory.later_peak * part)
    made = planned(recipes=known(name, names), memory=limit)
    assert made.rehearsal.memory.later_peak <= limit
    assert made.cost <= min(cost for cost in made.recipe_costs.values() if cost is not None)
    assert made.differences == ()


# -- real ranks ------------------------------------------------------------------------------------------------------


def trained(name, shape, names, path):
    """Three steps of the planned program and of one device: the losses and gradients are equal."""
    from shardwise.engine import decided  # its state is that of the rank, and not of the process that sends this

    on = mesh(shape, names)
    close = {"rtol": 1e-4, "atol": 1e-6} if name in SINGLE else {"rtol": 1e-9, "atol": 1e-11}
    (one, inputs), (many, _) = tiny(name), tiny(name)
    try:
        sw.distribute_module(many, on, path)
        whole = [Replicate()] * on.ndim
        placed = [sw.distribute_tensor(t, on, whole) for t in inputs]
        steps = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, many)]
        for _ in range(3):
            losses = one(*inputs), many(*placed)
            torch.testing.assert_close(losses[1].full_tensor(), losses[0], **close)
            for loss, step in zip(losses, steps, strict=True):
                step.zero_grad()
                loss.backward()
            for (parameter, p), q in zip(one.named_parameters(), many.parameters(), strict=True):
                torch.testing.assert_close(
                    q.grad.full_tensor(), p.grad, **close, msg=lambda m, n=parameter: f"{n}: {m}"
                )
            for step in steps:
                step.step()
        return decided.in_force.known
    finally:
        decided.use_decisions(None)


@pytest.mark.parametrize(("name", "names"), CASES)
def test_a_planned_program_gives_the_numbers_of_one_device(pool, tmp_path, name, names):
    """By the solver's plan, and by the best plan of each recipe."""
    files = {"solver": None, **known(name, names)}
    for plan, file in files.items():
        planned = sw.plan(partial(program, name), shape_of(names), names_of(names), keep=file, name=name)
        assert planned.differences == (), plan
        planned.save(tmp_path / f"{plan}.plan")
        calls = pool.run(trained, name, shape_of(names), names_of(names), str(tmp_path / f"{plan}.plan"))
        assert min(calls) > 0, plan
