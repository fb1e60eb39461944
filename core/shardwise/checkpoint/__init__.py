"""Checkpoints of a run: all ranks save together, and a checkpoint loads into any mesh and layout.

The tensors are in the format of ``torch.distributed.checkpoint``, which saves and loads MeshTensors by itself. This
package adds three things: an interrupted save never harms the last good checkpoint, loading runs no code of the
checkpoint, and errors are the same on every rank.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from shardwise.checkpoint import folder
from shardwise.checkpoint.agreement import Ranks
from shardwise.checkpoint.content import State, check_same_on_ranks, exact_sums, modules_of, state_dict_of
from shardwise.checkpoint.decisions import read_decisions, resume, write_decisions
from shardwise.checkpoint.folder import Checkpoint
from shardwise.checkpoint.placing import prepared, put_back, room_for
from shardwise.checkpoint.reading import SafePlanner, SafeReader, read_metadata
from shardwise.checkpoint.rules import rules_in_force, warn_of_other_rules
from shardwise.comm.call_posts import lines_by_rank
from shardwise.engine.decided import in_force
from shardwise.errors import CheckpointFileError, RankDisagreementError
from shardwise.kernel.arguments import check_flag, check_path, refuse_argument
from shardwise.tensor.dcp_chunks import check_has_data

__all__ = ["Checkpoint", "latest", "load", "save"]


def save(state: State, directory: str | Path, *, step: int, keep: int = 2, process_group: Any = None) -> Checkpoint:
    """Save a state as the checkpoint of ``step``. Every rank of the process group (default: all) must call this.

    ``state`` maps names to modules, optimizers (of these modules), objects with ``state_dict`` and ``load_state_dict``,
    tensors, plain values, and nested dicts and lists of such. Each rank writes its part of a MeshTensor. Everything
    else is saved once, so integers, strings and the like must be the same on every rank.

    The decisions of a learned program (:func:`shardwise.learn`) are saved with it, and a digest of the rules of each
    plugin.

    The checkpoint exists when the call returns and not before. The last ``keep`` checkpoints (at least one) stay, older
    ones are removed. Saving a step again replaces it; an earlier step than the last raises
    :class:`CheckpointStepError`. Raises a :class:`CheckpointError` (or what a tensor of the state raises), the same one
    on every rank.
    """
    check_path("save a checkpoint", directory)
    _check_state("save a checkpoint", state)
    for name, number in (("step", step), ("keep", keep)):
        if isinstance(number, bool) or not isinstance(number, int):
            refuse_argument("save a checkpoint", name, number, f"Give a whole number, as in {name}=2.")
    _check_group("save a checkpoint", process_group)
    ranks, where = Ranks(process_group), Path(directory).absolute()
    asked = f"save step {step} in {where}"
    check_has_data(asked)
    content: dict[str, Any] = {}

    def describe() -> tuple[Any, dict[str, int]]:
        content.update(state_dict_of(state))
        return (str(where), step, keep), exact_sums(content)

    with torch.no_grad():
        described = ranks.all(asked, describe)
        _check_same_arguments(asked, "save with different directories, steps or keep", [call for call, _ in described])
        check_same_on_ranks([sums for _, sums in described])
    partial = ranks.first(asked, lambda: folder.begin(where, step))
    try:
        ranks.all(asked, lambda: _check_shared(partial))
        with ranks.in_torch(asked), _quietly():
            dcp.save(content, storage_writer=dcp.FileSystemWriter(partial), process_group=process_group)
        files_by_rank = ranks.all(asked, lambda: folder.sums_of(partial, f"__{ranks.rank}_*"))
        files = {name: sums for files in files_by_rank for name, sums in files.items()}

        def complete() -> Checkpoint:
            write_decisions(partial)
            others = {**folder.sums_of(partial, ".metadata"), **folder.sums_of(partial, folder.DECISIONS)}
            return folder.commit(partial, {**files, **others}, step, keep, rules_in_force())

        return ranks.first(asked, complete)
    except Exception:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def load(
    state: MutableMapping[str, Any],
    directory: str | Path,
    *,
    step: int | None = None,
    verify: bool = True,
    process_group: Any = None,
) -> Checkpoint:
    """Load a checkpoint into a state, in place. Every rank of the process group (default: all) must call this.

    ``state`` is as for :func:`save`, with the names that were saved, on any mesh and with any placements; an optimizer
    need not have made a step. Values that are not tensors are put into the state's dicts and lists. Other entries of
    the checkpoint are not read. The checkpoint is that of ``step``, by default the last one; ``directory`` may also be
    one checkpoint, such as ``torch.distributed.checkpoint.save`` writes. ``verify`` reads all files once more to
    compare their checksums; of a folder that torch has written, those of its entries. Nothing in a checkpoint can run
    code.

    While :func:`shardwise.learn` is on, decisions that the checkpoint has are put in force, if they are for a mesh of
    the modules' shape: the first step is not recorded then.

    A checkpoint of a program with other rules is a :class:`RulesWarning`, which names the plugins that differ.

    Raises the same error on every rank: :class:`CheckpointFileError` for a checkpoint that is missing, incomplete,
    damaged, of an unknown format, or that names files outside of its folder; :class:`CheckpointKeyError`,
    :class:`CheckpointShapeError` and :class:`CheckpointDtypeError` for a state that does not fit. After such an error
    the state is as it was, on every rank: what is loaded takes its own memory until all ranks have all of it.
    """
    check_path("load a checkpoint", directory)
    _check_state("load a checkpoint", state)
    if step is not None and type(step) is not int:
        refuse_argument("load a checkpoint", "step", step, "Give a whole number, as in step=2, or None for the last.")
    check_flag("load a checkpoint", verify, "verify")
    _check_group("load a checkpoint", process_group)
    ranks, where = Ranks(process_group), Path(directory).absolute()
    asked = f"load {where}"
    calls = ranks.all(asked, lambda: (str(where), step, verify))
    _check_same_arguments(asked, "load with different directories, steps or verify", calls)
    chosen = ranks.first(asked, lambda: folder.find(where, step))
    if verify:
        ranks.all(asked, lambda: folder.check_files(chosen, ranks.rank, ranks.size))
    with torch.no_grad():
        metadata = ranks.own(asked, lambda: read_metadata(chosen.path))
        room = ranks.own(asked, lambda: room_for(state, metadata, chosen.path))
        with ranks.in_torch(asked), _quietly():
            # A folder that torch itself has written has no list of checksums, but its entries have some of their own.
            reader = SafeReader(chosen.path, metadata, verify=verify and chosen.step is None)
            planner = SafePlanner(chosen.path)
            dcp.load(room, storage_reader=reader, planner=planner, process_group=process_group)
        decisions = ranks.first(asked, lambda: read_decisions(chosen) if in_force.learner is not None else None)
        # Until here nothing of the state has changed, on any rank.
        parts = ranks.own(asked, lambda: prepared(state, room, chosen.path))
        ranks.own(asked, lambda: put_back(parts))
        ranks.first(asked, lambda: warn_of_other_rules(chosen))
        ranks.own(asked, lambda: resume(decisions, modules_of(state).values()))
    return chosen


def latest(directory: str | Path, *, process_group: Any = None) -> Checkpoint | None:
    """The last complete checkpoint of a directory, the same on every rank. Every rank must call this."""
    check_path("look for checkpoints", directory)
    _check_group("look for checkpoints", process_group)
    where = Path(directory).absolute()
    return Ranks(process_group).first(f"look for checkpoints in {where}", lambda: folder.newest(where))


# -- checks ------------------------------------------------------------------------------------------------------


def _check_state(asked: str, state: Any) -> None:
    """Raise :class:`ArgumentError` unless this maps names to what is saved."""
    if not isinstance(state, Mapping):
        refuse_argument(asked, "state", state, 'Give a dict of names, as in {"model": model, "optimizer": optimizer}.')


def _check_group(asked: str, group: Any) -> None:
    if not (group is None or isinstance(group, dist.ProcessGroup)):
        refuse_argument(asked, "process_group", group, "Give what dist.new_group() returned, or None for all ranks.")


def _check_same_arguments(asked: str, called: str, calls: Sequence[Any]) -> None:
    """Raise on every rank where one has called with other arguments."""
    if len(set(calls)) > 1:
        lines = lines_by_rank({rank: str(call) for rank, call in enumerate(calls)})
        raise RankDisagreementError(
            asked=asked,
            found=f"the ranks call {called}: {'; '.join(lines)}",
            do="Give the same arguments on every rank.",
            differences=tuple(lines),
        )


def _check_shared(partial: Path) -> None:
    if not partial.is_dir():
        raise CheckpointFileError(
            asked=f"write into {partial}",
            found="the first rank has made that folder and this rank does not see it",
            do="Name a directory on a file system that all ranks share.",
            path=str(partial),
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warning that torch.distributed is not initialized: one process may save, too."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
