"""Pictures of rules, of a call and of a plugin. Rows, strategies and costs are asked of shardwise."""

from __future__ import annotations

from unittest import mock

import torch
from svg_canvas import Picture

from shardwise.discovery.process import default_registry
from shardwise.kernel.placements import Replicate, Shard
from shardwise.planning import link_file
from shardwise.planning.strategies import rows, strategies_of
from shardwise.rule import AbstractMesh, OpSchema, TensorMeta, TensorSpec, rule

MM = torch.ops.aten.mm.default
RULE = rule(MM, "m k, k n -> m n", reduce={"k": "sum"}, linear=("self", "mat2"))


def _call() -> OpSchema:
    """The call of docs/explain.md: mm of f32[8,16] at S(0),R and f32[16,32] at S(1),S(0)."""
    mesh = AbstractMesh((2, 2))
    x = TensorSpec(mesh, (Shard(0), Replicate()), TensorMeta((8, 16), (16, 1), torch.float32))
    w = TensorSpec(mesh, (Shard(1), Shard(0)), TensorMeta((16, 32), (32, 1), torch.float32))
    return OpSchema.of(MM, x, w)


def rule_to_strategy() -> Picture:
    """One line of a rule, its rows, and what they become on a mesh."""
    picture = Picture(790, 372, "From the notation of a rule to its rows, and from rows to the cheapest strategy")
    heads = [(20, "1  The rule"), (262, "2  Its rows"), (478, "3  Strategies on a 2 x 2 mesh")]
    for x, words in heads:
        picture.text(x, 30, words, size=14, kind="ink strong")
    picture.label(20, 48, 196, 40, [str(RULE).partition(": ")[2]], "r0")
    says = [
        "Every dim that operands",
        "share may be sharded.",
        "k vanishes: its shards are",
        "partial sums.",
        "",
        "Linear in each operand:",
    ]
    picture.lines(20, 112, [*says, "one may be partial."], size=12, kind="soft")
    picture.lines(20, 256, ["The rule knows no mesh", "and no cost."], size=12, kind="soft")
    picture.arrow((222, 68), (254, 68))
    for i, row in enumerate(rows(RULE, _call())):
        name, _, text = str(row).partition(": ")
        y = 48 + 37 * i
        picture.box(262, y, 178, 32, "r2" if name in ("shard n", "shard k") else "box")
        picture.text(270, y + 13.5, name, size=11, kind="soft")
        picture.text(270, y + 27, text, size=11, kind="ink mono", room=168)
    picture.arrow((446, 68), (470, 68))
    with mock.patch.dict("os.environ", {link_file.ENVIRONMENT: "off"}):
        listed = strategies_of(default_registry(), _call()).strategies
    picture.text(478, 60, "x: S(0),R    w: S(1),S(0)", size=11.5, kind="accent mono")
    for i, strategy in enumerate(listed[:6]):
        y = 72 + 40 * i
        picture.box(478, y, 296, 34, "good" if i == 0 else "box")
        picture.text(
            486, y + 21, str(strategy).replace(", ", ",").replace("],[", "] ["), size=10, kind="ink mono", room=240
        )
        picture.text(766, y + 21, f"{1e6 * strategy.cost:.1f} µs", size=10.5, kind="ink strong", at="end")
    picture.text(
        478, 72 + 240 + 18, f"... of {len(listed)}, the cheapest first. The cost is what", size=11.5, kind="soft"
    )
    picture.text(478, 72 + 240 + 34, "moving the operands takes.", size=11.5, kind="soft")
    return picture


def life_of_a_call() -> Picture:
    """A hit is the short way, a miss the long one, once."""
    picture = Picture(790, 316, "The life of a call: a hit runs its plan, a miss makes one first")
    picture.label(20, 34, 118, 54, ["torch.mm(a, b)", "MeshTensors"], "r0")
    picture.arrow((140, 61), (168, 61))
    picture.label(170, 34, 118, 54, ["key", "op and specs"])
    picture.arrow((290, 61), (318, 61), kind="bold")
    for i, lines in enumerate(
        [["move operands", "usually none"], ["local op", "on the shards"], ["wrap", "a MeshTensor"]]
    ):
        picture.label(320 + 158 * i, 34, 128, 54, lines, "good")
        if i:
            picture.arrow((292 + 158 * i, 61), (318 + 158 * i, 61), kind="bold")
    picture.text(304, 24, "hit: the key has a plan", size=12, kind="accent", at="start")
    picture.arrow((229, 90), (229, 148), (40, 148), (40, 188))
    picture.text(52, 138, "miss: first of its kind", size=12, kind="accent")
    steps = [
        ["OpSchema", "no data in it"],
        ["registry", "whose rule holds"],
        ["rows", "what is legal"],
        ["choice", "what is cheapest"],
        ["steps", "what is sent"],
        ["Plan", "kept for the key"],
    ]
    for i, lines in enumerate(steps):
        picture.label(20 + 127 * i, 190, 113, 54, lines, "sum" if i < 5 else "good")
        if i:
            picture.arrow((8 + 127 * i, 217), (18 + 127 * i, 217))
    picture.arrow((712, 188), (712, 148), (304, 148), (304, 64))
    says = "All of this is arithmetic, the same on every rank. On a mesh's first op the ranks compare their rules."
    picture.text(20, 280, says, size=12, kind="soft")
    return picture


def life_of_a_plugin() -> Picture:
    """From pip install to the choice of a rule."""
    picture = Picture(790, 330, "The life of a plugin: from its entry point to a plan, and how it may end before")
    steps = [
        (["pip install", "an entry point"], "r0", ""),
        (["enumerate", "all entry points"], "box", "another major version: needs upgrade"),
        (["filter", "by the settings"], "box", "blocked"),
        (["version", "what it requires"], "box", "refused"),
        (["import", "shardwise_register"], "box", "failed, with a warning"),
    ]
    for i, (lines, fill, end) in enumerate(steps):
        x = 20 + 154 * i
        picture.label(x, 44, 136, 56, lines, fill)
        if i:
            picture.arrow((x - 16, 72), (x - 2, 72))
        if end:
            picture.arrow((x + 68, 102), (x + 68, 132))
            words = end.split(": ")
            picture.label(x, 134, 136, 40, [words[-1]], "bad") if len(end) < 20 else None
            if len(end) >= 20:
                _two_lines(picture, x, end)
    picture.text(20, 28, "before anything is imported", size=12, kind="soft")
    picture.text(636, 28, "once a process", size=12, kind="soft")
    later = [
        ["registry", "all its rules, or none"],
        ["agreement", "ranks have the same"],
        ["precedence", "whose rule holds"],
        ["plan", "of every call"],
    ]
    picture.arrow((772, 74), (782, 74), (782, 206), (88, 206), (88, 228))
    for i, lines in enumerate(later):
        x = 20 + 196 * i
        picture.label(x, 230, 162, 56, lines, "good")
        if i:
            picture.arrow((x - 32, 258), (x - 2, 258))
    picture.text(20, 312, "shardwise plugins shows where each one stands.", size=12, kind="soft")
    return picture


def _two_lines(picture: Picture, x: float, end: str) -> None:
    first, second = end.replace(": ", ", ").split(", ")
    picture.box(x, 134, 136, 46, "bad")
    picture.text(x + 68, 153, first, size=11, kind="soft", at="middle", room=132)
    picture.text(x + 68, 170, second, size=12, kind="ink strong", at="middle", room=132)


def landing() -> Picture:
    """The whole in one look: a program, rules from plugins, a mesh, the same number."""
    picture = Picture(
        790, 300, "An ordinary program runs on a mesh by rules that plugins bring, and gives the same number"
    )
    picture.text(20, 30, "your program", size=13, kind="ink strong")
    picture.box(20, 42, 210, 104, "box")
    picture.lines(
        34,
        70,
        ["y = torch.relu(x @ w)", "loss = y.mean()", "loss.backward()", "optimizer.step()"],
        size=12,
        kind="ink mono",
        step=20,
    )
    picture.text(20, 184, "rules, each from a plugin", size=13, kind="ink strong")
    rules = [("matmul", "m k, k n -> m n"), ("pointwise", "... -> ..."), ("yours", "n d, d -> n d")]
    for i, (name, text) in enumerate(rules):
        picture.box(20, 196 + 30 * i, 210, 26, "sum" if i < 2 else "r0")
        picture.text(28, 213 + 30 * i, name, size=11.5, kind="ink strong")
        picture.text(222, 213 + 30 * i, text, size=10.5, kind="ink mono", at="end")
    picture.arrow((234, 94), (280, 94), kind="bold")
    picture.arrow((234, 238), (256, 238), (256, 150), (280, 150), kind="bold")
    picture.text(286, 30, "a mesh of devices", size=13, kind="ink strong")
    picture.box(286, 42, 290, 238, "card")
    for rank in range(4):
        x, y = 300 + 136 * (rank % 2), 56 + 112 * (rank // 2)
        picture.box(x, y, 126, 102, f"r{rank}")
        picture.text(x + 63, y + 20, f"dp {rank // 2}, tp {rank % 2}", size=11.5, kind="ink", at="middle")
        for i, (name, words) in enumerate(
            [
                ("x", f"rows {8 * (rank // 2)}-{8 * (rank // 2) + 7}"),
                ("w", f"columns {8 * (rank % 2)}-{8 * (rank % 2) + 7}"),
            ]
        ):
            picture.box(x + 8, y + 30 + 32 * i, 110, 26, "card")
            picture.text(x + 16, y + 47 + 32 * i, name, size=12, kind="accent mono strong")
            picture.text(x + 112, y + 47 + 32 * i, words, size=11, kind="ink", at="end")
    picture.arrow((582, 160), (622, 160), kind="bold")
    picture.text(628, 94, "the numbers of", size=13, kind="ink strong")
    picture.text(628, 112, "one device", size=13, kind="ink strong")
    picture.label(628, 132, 142, 56, ["the same loss", "or an error: why"], "good")
    picture.lines(
        628,
        216,
        ["Each op takes its", "cheapest legal strategy", "and sends what it needs."],
        size=11.5,
        kind="soft",
        step=17,
    )
    return picture
