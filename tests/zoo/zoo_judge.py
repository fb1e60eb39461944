"""What became of a model on a layout: pass, refused, failed, wrong or hung, and why."""

import warnings
from pathlib import Path

import torch
from attrs import frozen
from zoo_packages import recipes_of
from zoo_trial import TOLERANCE, TOLERANCE_FLOAT32, DtypesSeen, Recipe, compared_on_rank, made, sensitivity, trained

from shardwise import errors
from shardwise.errors import WorkerError
from shardwise.testing import WorkerPool

IMPORT_SECONDS = 180.0


@frozen
class Verdict:
    layout: str
    result: str
    why: str = ""
    trace: str = ""


def prepared(pool: WorkerPool, packages: list[str]) -> WorkerPool:
    """The pool with the packages imported on every rank, which must not count as a hang."""
    if not pool.pids:
        pool.run(import_all, packages, timeout=IMPORT_SECONDS)
    return pool


def import_all(packages: list[str]) -> None:
    torch.backends.cudnn.allow_tf32 = False  # a model that calculates a part in float32 means float32
    warnings.simplefilter("ignore")
    for package in packages:
        recipes_of(package)


def on_rank(package: str, name: str, layout: str, path: str, device: str) -> tuple[list[str], bool]:
    return compared_on_rank(recipes_of(package)[f"{package}/{name}"], layout, path, device)


def judge(
    pool: WorkerPool | None,
    recipe: Recipe,
    layouts: tuple[str, ...],
    folder: Path,
    seconds: float,
    device: str = "cpu",
) -> list[Verdict]:
    """One device first, then every layout. A recipe that fails on one device says nothing about a mesh."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, batch = made(recipe, device)
            with DtypesSeen() as seen:
                expected = trained(model, batch)
            expected = {name: tensor.detach().clone() for name, tensor in expected.items()}
            sensitive = sensitivity(recipe, expected, device)
    except Exception as error:  # noqa: BLE001  # whatever a package of others raises
        return [Verdict("one device", "broken recipe", f"{type(error).__name__}: {error}")]
    path = folder / "expected.pt"
    tolerance = TOLERANCE_FLOAT32 if seen.float32 else TOLERANCE
    torch.save((tolerance, sensitive, expected), path)
    if pool is None:
        return [Verdict("one device", "pass")]
    closeness = f"compared to {tolerance:.0e}: calculates in float32" if seen.float32 else ""
    return [
        _on_layout(prepared(pool, [recipe.package]), recipe, layout, path, seconds, closeness, device)
        for layout in layouts
    ]


def _on_layout(
    pool: WorkerPool, recipe: Recipe, layout: str, path: Path, seconds: float, closeness: str, device: str
) -> Verdict:
    try:
        found = pool.run(on_rank, recipe.package, recipe.name, layout, str(path), device, timeout=seconds)
    except WorkerError as error:
        return _verdict_of(error, layout)
    wrong = next((differences for differences, _ in found if differences), None)
    if wrong is not None:
        return Verdict(layout, "wrong", "; ".join(wrong[:6]))
    if any(is_sensitive for _, is_sensitive in found):
        closeness = "; ".join(filter(None, [closeness, "a rounding of the parameters matters more than that"]))
    return Verdict(layout, "pass", closeness)


def _verdict_of(error: WorkerError, layout: str) -> Verdict:
    failures = [failure for failure in error.errors if failure is not None]
    first = min(failures, key=lambda failure: (failure.kind == "RankFailedError", failure.kind == "hung"))
    if first.kind in {"hung", "died"}:
        return Verdict(layout, first.kind, first.message, first.traceback)
    kind = getattr(errors, first.kind, None)
    on_purpose = isinstance(kind, type) and issubclass(kind, errors.ShardingError)
    alone = " (only some ranks)" if len(failures) < len(error.errors) else ""
    return Verdict(
        layout, "refused" if on_purpose else "failed", f"{first.kind}: {first.message}{alone}", first.traceback
    )
