"""Trains the zoo: ``python tests/zoo [PATTERN ...]``. A JSON line per model and layout, and a table at the end."""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from zoo_judge import Verdict, judge
from zoo_packages import installed, recipes_of
from zoo_trial import LAYOUTS

from shardwise.testing import WorkerPool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"], help="shell patterns on package/name")
    parser.add_argument("--output", type=Path, default=Path("build/zoo.jsonl"))
    parser.add_argument("--seconds", type=float, default=60.0, help="after which a layout counts as hung")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS), help="which columns")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where models and meshes are")
    parser.add_argument("--slice", default="0/1", help="I/N: each N-th model, from the I-th on")
    parser.add_argument("--single", action="store_true", help="one device only: which recipes work")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    wanted = [p for p in installed() if any(fnmatchcase(p, pattern.partition("/")[0]) for pattern in options.patterns)]
    every = {name: recipe for package in wanted for name, recipe in recipes_of(package).items()}
    chosen = {n: r for n, r in every.items() if any(fnmatchcase(n, p) for p in options.patterns)}
    first, every_nth = map(int, options.slice.split("/"))
    chosen = dict(list(chosen.items())[first::every_nth])
    options.output.parent.mkdir(parents=True, exist_ok=True)
    verdicts: dict[str, list[Verdict]] = {}
    with WorkerPool(4) as pool, tempfile.TemporaryDirectory() as folder, options.output.open("w") as lines:
        for name, recipe in chosen.items():
            start = time.monotonic()
            layouts = () if options.single else tuple(options.layouts)
            pool_or_none = None if options.single else pool
            verdicts[name] = judge(pool_or_none, recipe, layouts, Path(folder), options.seconds, options.device)
            for verdict in verdicts[name]:
                row = {"model": name, "layout": verdict.layout, "result": verdict.result, "why": verdict.why}
                lines.write(json.dumps(row) + "\n")
                lines.flush()
            words = ", ".join(f"{v.layout}: {v.result} {v.why[:150]}" for v in verdicts[name])
            sys.stdout.write(f"{name} ({time.monotonic() - start:.1f} s) {words}\n")
            sys.stdout.flush()
    show(verdicts)


def show(verdicts: dict[str, list[Verdict]]) -> None:
    table = Table("model", *LAYOUTS, title="The zoo")
    for name, row in verdicts.items():
        cells = {v.layout: v.result if v.result == "pass" else f"{v.result}: {v.why}"[:100] for v in row}
        table.add_row(name, *(cells.get(layout, cells.get("one device", "")) for layout in LAYOUTS))
    console = Console(width=160)
    console.print(table)
    for layout in LAYOUTS:
        count = Counter(v.result for row in verdicts.values() for v in row if v.layout == layout)
        console.print(layout, dict(count))


if __name__ == "__main__":
    main()
