"""What a person sees while the demo trains: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from shardwise.demo.settings import RunSettings
from shardwise.demo.training import Step

__all__ = ["progress", "tokens_per_second"]

PLAIN_LINES = 10
"""Lines per run if the output is not a terminal, without the first step's."""


@contextmanager
def progress(title: str, settings: RunSettings, *, shown: bool) -> Iterator[Callable[[Step], None]]:
    """A function that shows a finished step; it shows nothing if ``shown`` is false."""
    console = Console(quiet=not shown)
    if console.is_terminal and shown:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TimeElapsedColumn(),
            console=console,
            # The machine's cores are for training.
            refresh_per_second=4,
        ) as bar:
            task = bar.add_task(title, total=settings.steps, loss="-", speed="-")
            yield lambda step: bar.update(task, advance=1, loss=f"{step.loss:.4f}", speed=_speed(settings, step))
    else:
        every = max(1, settings.steps // PLAIN_LINES)
        lines = {1, *range(every, settings.steps + 1, every)}

        def tell(step: Step) -> None:
            if step.number in lines:
                speed = f"{_speed(settings, step)} tokens/s" if step.seconds else "from the checkpoint"
                line = f"{title}: step {step.number}/{settings.steps}, loss {step.loss:.4f}, {speed}"
                console.print(line, highlight=False, soft_wrap=True)

        yield tell


def tokens_per_second(settings: RunSettings, steps: list[Step]) -> float:
    """The mean speed of the steps of this process, without the first one, which makes the plans, if there are others.
    0 if all steps come from a checkpoint.
    """
    own = [step for step in steps if step.seconds]
    timed = own[1:] or own
    return len(timed) * settings.tokens_per_step / sum(step.seconds for step in timed) if timed else 0.0


def _speed(settings: RunSettings, step: Step) -> str:
    return f"{settings.tokens_per_step / step.seconds:,.0f}" if step.seconds else "-"
