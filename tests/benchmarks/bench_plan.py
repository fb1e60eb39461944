"""Plans of whole steps beside the recipes of experts: what they cost by the cost model, and how long they take to make.

Run it with ``python tests/benchmarks/bench_plan.py [--only NAME]... [--large] [--prove] [--json FILE]``. Each program
is planned with nothing placed but its batch, from the recipes in ``plans`` and without them. The plan is never dearer
than a recipe: that is asserted. Long contexts need the plugin of ``plugins_contrib/shardwise-ring-attention``, and are
left out without it. ``--prove`` gives the gap as well. ``--large`` adds 7 billion parameters on 8x16x8 with a limit,
and 405 billion on 16x16x8x8. Seconds are of one core; memory is that of a rank from the second step on.
"""

import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import click
import models
import torch
from attrs import frozen
from experts import MixtureOfExperts
from measuring import console, line, ratio_line, report
from recipes import GPT as GPT_RECIPES
from recipes import recipes
from rich.table import Table

import shardwise as sw
from shardwise import Replicate, Shard
from shardwise.demo.large import WithLoss
from shardwise.demo.model import GPT
from shardwise.program.amounts import milliseconds, parse_size, size_text


@frozen
class Case:
    """A GPT on a mesh, or a mixture of ``experts``, or a ``model`` of models.py that takes what ``given`` makes.

    ``shared`` are the mesh dims that share the batch, ``along`` those that share the positions, if any.
    """

    name: str
    shape: tuple[int, ...]
    names: tuple[str, ...]
    sizes: tuple  # layers, width, heads, context, sequences; of a ``model`` its arguments
    shared: tuple[str, ...] = ()
    wires: tuple[str, ...] | None = None
    memory: str | None = None
    seconds: float = 30.0
    large: bool = False
    experts: int = 0
    along: tuple[str, ...] = ()
    #: What the plan may be above the bound.
    gap: float = 0.005
    model: str = ""
    given: Callable | None = None

    def program(self, mesh):
        """The step, with its parameters whole on every rank."""
        if self.model:
            return models.placed(mesh, getattr(models, self.model)(*self.sizes), self.given(), self.shared)
        layers, width, heads, context, batch = self.sizes
        dims = {**dict.fromkeys(self.shared, Shard(0)), **dict.fromkeys(self.along, Shard(1))}
        places = [dims.get(name, Replicate()) for name in self.names]
        if self.experts:
            experts = MixtureOfExperts(layers, width, 2 * width, self.experts)
            sw.distribute_module(experts, mesh, src_data_rank=None)
            x = torch.zeros(batch, context, width, device=mesh.device_type)
            x = sw.distribute_tensor(x, mesh, places, src_data_rank=None)
            return experts, x, torch.optim.AdamW(experts.parameters(), fused=True)
        model = GPT(layers=layers, width=width, heads=heads, context=context)
        sw.distribute_module(model, mesh, src_data_rank=None)
        ids = torch.zeros(batch, context, dtype=torch.int64, device=mesh.device_type)
        ids = sw.distribute_tensor(ids, mesh, places, src_data_rank=None)
        return WithLoss(model), (ids, ids), torch.optim.AdamW(model.parameters(), fused=True)

    def recipes(self):
        """The recipes for this program and mesh dims of these names."""
        if self.model:
            return recipes(f"models:{self.model}", self.names)
        return recipes("experts:MixtureOfExperts" if self.experts else GPT_RECIPES, self.names)


SMALL = (4, 128, 4, 64, 8)
EXPERTS = (4, 256, 0, 64, 8)
LONG = (2, 512, 4, 131_072, 1)
SEVEN_BILLION = (32, 4288, 32, 4096, 128)
CLUSTER = ("infiniband", "nvlink", "infiniband")


def seven_billion_within(gib):
    """The step of 7 billion parameters, which may also shard its batch, in so many GiB a rank."""
    name, mesh = f"7 billion, 8x16x8, {gib} GiB", ((8, 16, 8), ("pod", "tp", "dp"))
    return Case(name, *mesh, SEVEN_BILLION, (), CLUSTER, f"{gib}GiB", large=True, gap=0.03)


CASES = (
    Case("GPT, 4 layers, (4,)", (4,), ("tp",), SMALL),
    Case("GPT, 4 layers, 2x2", (2, 2), ("dp", "tp"), SMALL, ("dp",)),
    Case("8 experts, 4 layers, (4,)", (4,), ("tp",), EXPERTS, experts=8),
    Case("8 experts, 4 layers, 2x4", (2, 4), ("dp", "tp"), EXPERTS, ("dp",), experts=8),
    Case("long context, 2 layers, (8,)", (8,), ("cp",), LONG, along=("cp",)),
    Case("long context, 2 layers, 2x4", (2, 4), ("cp", "tp"), LONG, along=("cp",)),
    Case("7 billion, 8x16x8", (8, 16, 8), ("pod", "tp", "dp"), SEVEN_BILLION, ("pod", "dp"), CLUSTER, gap=0.03),
    *(seven_billion_within(gib) for gib in (64, 16)),
    Case(
        "70 billion, 16x8",
        (16, 8),
        ("dp", "tp"),
        (80, 8192, 64, 8192, 16),
        (),
        ("infiniband", "nvlink"),
        "80GiB",
        large=True,
    ),
    Case(
        "61 layers of 64 experts, 8x8x16",
        (8, 8, 16),
        ("pod", "dp", "tp"),
        (61, 4096, 0, 4096, 32),
        (),
        ("infiniband", "infiniband", "nvlink"),
        "80GiB",
        60.0,
        large=True,
        experts=64,
        gap=0.03,
    ),
    Case(
        "405 billion, 16x16x8x8",
        (16, 16, 8, 8),
        ("pod", "dp", "tp", "cp"),
        (126, 16384, 128, 8192, 512),
        (),
        ("infiniband", "infiniband", "nvlink", "infiniband"),
        "80GiB",
        60.0,
        large=True,
        gap=0.05,
    ),
)


LLAMA_8 = (32, 4096, 32, 8, 14_336, 128_256, 8192)
LLAMA_70 = (80, 8192, 64, 8, 28_672, 128_256, 8192)
TRANSLATOR = (6, 1024, 16, 32_000, 512)
VIT = (12, 768, 12, 224, 16)
RESNET_50 = ((3, 4, 6, 3), 64)
UNET = (64, 4, 8)
TABLES = (26, 1_000_000, 128, 13)
GROUPED = (4, 1024, 2048, 64)
ON_8, ON_8_BATCH, ON_2X4 = ((8,), ("tp",)), ((8,), ("dp",)), ((2, 4), ("dp", "tp"))


def of_model(name, mesh, model, sizes, given, *given_sizes, **more):
    """The step of a model, whose batch is whole: the plan decides who takes which part of it."""
    return Case(name, *mesh, sizes, model=model, given=partial(given, *given_sizes), **more)


CASES += (
    of_model("Llama, 8 billion, (8,)", ON_8, "Llama", LLAMA_8, models.words_in, 128_256, 4, 8192, memory="80GiB"),
    of_model("Llama, 8 billion, 2x4", ON_2X4, "Llama", LLAMA_8, models.words_in, 128_256, 4, 8192, memory="80GiB"),
    of_model(
        "Llama, 70 billion, 16x8",
        ((16, 8), ("dp", "tp")),
        "Llama",
        LLAMA_70,
        models.words_in,
        128_256,
        16,
        8192,
        wires=("infiniband", "nvlink"),
        memory="80GiB",
        seconds=45.0,
        large=True,
    ),
    of_model("translator, 2x4", ON_2X4, "EncoderDecoder", TRANSLATOR, models.pairs_in, 32_000, 32, 512),
    of_model("vision transformer, (8,)", ON_8_BATCH, "VisionTransformer", VIT, models.images_in, 64, 224),
    of_model("vision transformer, 2x4", ON_2X4, "VisionTransformer", VIT, models.images_in, 64, 224),
    of_model("ResNet-50, (8,)", ON_8_BATCH, "ResNet", RESNET_50, models.images_in, 64, 224),
    of_model("ResNet-50, 2x4", ON_2X4, "ResNet", RESNET_50, models.images_in, 64, 224),
    of_model("U-Net, 2x4", ON_2X4, "UNet", UNET, models.noisy_in, 16, 128),
    of_model("26 tables, (8,)", ON_8_BATCH, "Recommendation", TABLES, models.clicks_in, 8192, 26, 1_000_000, 13),
    of_model("64 experts by grouped products, 2x4", ON_2X4, "GroupedExperts", GROUPED, models.vectors_in, 8, 512, 1024),
)


def planned(case, recipes, prove=False):
    memory = None if case.memory is None else parse_size(case.memory)
    return sw.plan(case.program, case.shape, case.names, memory=memory, recipes=recipes, wires=case.wires, prove=prove)


@click.command()
@click.option("--only", multiple=True, help="Parts of names of programs.")
@click.option("--large", is_flag=True, help="The large ones, too: minutes each.")
@click.option("--rounds", default=1, show_default=True, help="How often each is planned; the medians count.")
@click.option("--prove", is_flag=True, help="Bound each plan, too.")
@click.option("--json", "json_file", type=click.Path())
def main(only, large, rounds, prove, json_file):
    """Plan each program, and show what it took and what it costs."""
    lines, rows = [], []
    for case in CASES:
        if (case.large and not large and not only) or (only and not any(part in case.name for part in only)):
            continue
        if case.along and find_spec("shardwise_ring_attention") is None:
            console().print(f"{case.name}: left out, shardwise-ring-attention is not installed")
            continue
        seconds = []
        for _ in range(rounds):
            begin = time.perf_counter()
            alone = planned(case, {})
            seconds.append(time.perf_counter() - begin)
        made = planned(case, case.recipes(), prove)
        for name, cost in made.recipe_costs.items():
            assert cost is None or made.cost <= cost, f"the recipe {name} is cheaper than the plan"
        took = statistics.median(seconds)
        console().print(table(case, alone, made, took))
        best = min([made.cost, *(cost for cost in made.recipe_costs.values() if cost is not None)])
        lines.append(ratio_line(f"{case.name}: plan from nothing", alone.cost / best, 1.0, of=" of the best recipe"))
        lines.append(
            line(f"{case.name}: time to plan", f"≤ {case.seconds:.0f} s", f"{took:.1f} s", met=took <= case.seconds)
        )
        if prove:
            lines.append(line(f"{case.name}: gap", f"≤ {case.gap:.1%}", f"{made.gap:.2%}", met=made.gap <= case.gap))
        rows.append({"program": case.name, "seconds": seconds, "cost": alone.cost, "recipes": made.recipe_costs})
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    report(rows, lines, json_file, peak_gib=peak)
    console().print(f"most memory of this process: {peak:.2f} GiB")


def table(case, alone, made, seconds):
    """What one program costs by each choice."""
    shown = Table("choice", "cost of a step", "memory of a rank", "collectives", title=case.name)
    rehearsals = [
        ("op by op", alone.recorded_cost, alone.recorded),
        ("plan, from nothing", alone.cost, alone.rehearsal),
    ]
    for name, cost, rehearsal in rehearsals:
        count = sum(
            times for times, _ in (alone.recorded_collectives if name == "op by op" else alone.collectives).values()
        )
        shown.add_row(
            name, "-" if cost is None else milliseconds(cost), size_text(rehearsal.memory.later_peak), f"{count:,}"
        )
    for name, cost in made.recipe_costs.items():
        shown.add_row(f"{name}, its activations planned", "-" if cost is None else milliseconds(cost), "", "")
    shown.add_row(
        "plan, from the recipes, too", milliseconds(made.cost), size_text(made.rehearsal.memory.later_peak), ""
    )
    parts = ", ".join(f"{phase} {s:.1f} s" for phase, s in alone.seconds.items())
    verified = "verified" if not alone.differences and not made.differences else "NOT VERIFIED"
    shown.caption = f"{alone.calls:,} calls, {len(alone.decisions):,} decisions; {seconds:.1f} s: {parts}; {verified}"
    return shown


if __name__ == "__main__":
    main()
