"""The errors of shardwise, one type per cause.

Every error says three things: what was *asked*, what was *found*, and what to *do*. Programs can read the same facts,
and the values behind them, from attributes.
"""

from __future__ import annotations

import os
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import Any


class ShardingError(RuntimeError):
    """Base of all errors that shardwise raises on purpose.

    ``asked``, ``found`` and ``do`` are the three parts of the message. Every other keyword is stored in ``fields`` and
    can be read as an attribute.
    """

    def __init__(self, *, asked: str, found: str, do: str, **fields: Any) -> None:
        self.asked = asked
        self.found = found
        self.do = do
        self.fields = fields
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The three parts in one: what ``str`` gives, as long as nobody has added words of its own."""
        # What was found may be another error's message, with a full stop of its own.
        end = "" if self.found.endswith(".") and not self.found.endswith("..") else "."
        return f"{self.asked}: {self.found}{end} {self.do}"

    def __getattr__(self, name: str) -> Any:
        fields: dict[str, Any] = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no field {name!r}; it has {sorted(fields)}")

    def __reduce__(self) -> Any:
        # The worker pool sends errors between processes. Pickle cannot pass keyword-only arguments by itself.
        return _rebuild, (type(self), self.asked, self.found, self.do, _picklable(self.fields))


def _rebuild(cls: type[ShardingError], asked: str, found: str, do: str, fields: dict[str, Any]) -> ShardingError:
    return cls(asked=asked, found=found, do=do, **fields)


def _picklable(fields: dict[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None), tuple, list, dict)
    return {name: value if isinstance(value, plain) else repr(value) for name, value in fields.items()}


class ArgumentError(ShardingError, TypeError):
    """A function was given an argument of another kind than it takes: a tuple for a mesh, text for a flag.

    ``argument`` is its name. It is a ``TypeError`` as well, which Python raises for such arguments.
    """


# -- layouts ---------------------------------------------------------------------------------------------------


class PlacementError(ShardingError, ValueError):
    """The tensor cannot have a placement: a shard dim out of range, an unknown reduction.

    It is a ``ValueError`` as well, which torch raises for such placements.
    """


class PlacementCountError(PlacementError):
    """The number of placements is not the number of mesh dims."""


class LayoutError(ShardingError):
    """The placements of shardwise cannot express a layout, or a local tensor does not fit its layout."""


class LocalPlacementError(PlacementError):
    """The placements that :func:`shardwise.local` was given do not fit the function, its arguments or its results."""


class LocalResultError(LayoutError):
    """A local function returned parts that do not make the global tensor that its placements say."""


class LocalGradientError(LayoutError):
    """A gradient at the border of a local function cannot be derived from placements."""


class MeshMismatchError(ShardingError):
    """Operands of one op are on different meshes."""


class TorchToolError(ShardingError):
    """A tool of torch that places or sends tensors itself was given some that are on a mesh already.

    ``tool`` names it, such as ``fully_shard``, and ``name`` the parameter or buffer. Nothing was changed or sent.
    """


class OffMeshError(ShardingError):
    """A rank that is not on the mesh of a tensor, so that it has no part of it."""


class LeafError(ShardingError):
    """A whole tensor is not a leaf, so that a MeshTensor made of it would cut off its gradient."""


class DeviceMismatchError(ShardingError):
    """A tensor is on another device type than the mesh."""


class PlainTensorError(ShardingError):
    """A plain tensor and a MeshTensor are operands of one op."""


class HostWaitError(ShardingError):
    """An op left the device, or made the host wait for it, under :func:`shardwise.testing.on_device`."""


# -- ops -------------------------------------------------------------------------------------------------------


class NoRuleError(ShardingError):
    """No installed plugin has a rule for the op."""


class UnknownOpWarning(UserWarning):
    """An op without a rule runs on whole tensors on every rank, because the program asked for that."""


class CallError(ShardingError):
    """The op's schema does not allow the call: an argument is missing, unknown or of the wrong kind."""


class NoStrategyError(ShardingError):
    """The op has a rule, but none of its rows is legal for this call."""


class InPlaceError(NoStrategyError):
    """The tensor that an in-place or ``out=`` op writes cannot keep its placements."""


class ViewError(NoStrategyError):
    """A view would need data from another rank."""


class ItemError(ShardingError):
    """``.item()`` was called on a tensor that does not have exactly one element."""


class ItemValueError(ItemError, ValueError):
    """A tensor that does not have exactly one element was taken for a number, as by ``float()`` and ``int()``.

    It is a ``ValueError`` as well, which torch raises there.
    """


class ItemTypeError(ItemError, TypeError):
    """A tensor that does not have exactly one element was taken for an index, as by ``operator.index`` and ``range``.

    It is a ``TypeError`` as well, by which programs learn that a value is not an index.
    """


class ListLengthError(ShardingError):
    """Tensor lists that are zipped (foreach, fused) have unequal lengths."""


class TracingError(ShardingError):
    """``torch.compile`` cannot put a call into a graph, because the call depends on data of other ranks, or its sizes
    on data.
    """


class RankDisagreementError(ShardingError):
    """Ranks of one mesh have different rules, values or calls where they must have the same."""


class DifferentSeedsWarning(UserWarning):
    """Torch's generators have different seeds on the ranks of a mesh, and that of its first rank holds for all."""


class RankFailedError(ShardingError):
    """Another rank failed or ended, so a collective that waits for it cannot finish.

    ``rank`` is the rank that failed, ``error`` the type and message of its error, ``op`` the op that raised it ("" for
    an error that was not raised by an op).
    """


class RankWaitError(ShardingError):
    """A collective has waited for other ranks for longer than the setting ``wait-limit`` allows.

    ``differences`` has a line for each rank: what it waits in, or what it did last.
    """


class ForkedProcessError(ShardingError):
    """A process that a rank has forked issues a collective: it is no rank, and the collective would never end."""


class NoPlanError(ShardingError):
    """No legal choice for all calls of a step together was found. Each call alone may have one."""


class CommunicationError(ShardingError):
    """A call would send what the policy in force forbids (:func:`shardwise.communication`). Nothing was sent.

    ``op``, ``operand``, ``kind``, ``mesh_dims``, ``nbytes`` (of a rank), ``phase``, ``policy`` and ``site`` (file and
    line) say what; ``source`` and ``target`` are the layouts between which an operand would move.
    """


class CommunicationWarning(UserWarning):
    """A call sends what the policy in force warns of."""


class GatheredWholeWarning(UserWarning):
    """The program gathers plain tensors of which every rank has the whole value: a sum counts it once per rank."""


class LearnedLayoutWarning(UserWarning):
    """The program reads a part of a tensor that lies elsewhere than in the step from which it was learned."""


class UnseenGraphWarning(UserWarning):
    """A graph is compiled to code whose collectives are neither recorded nor compared over the ranks."""


# -- rules and plugins -----------------------------------------------------------------------------------------


class RuleError(ShardingError):
    """A rule is malformed. The error is raised when the rule is created, or at the first call that it does not fit."""


class NotationError(RuleError):
    """A notation string is malformed."""


class RuleArgumentError(RuleError):
    """A rule names an argument that its op lacks."""


class WrongRuleError(ShardingError):
    """A call that ran by a rule has other results than on one device; a spot check found it.

    ``op``, ``plugin`` and ``row`` say what decided the call, ``wrong`` what differs.
    """


class RuleConflictError(ShardingError):
    """Two plugins supply a rule for one op and nothing says which wins."""


class PluginLoadError(ShardingError):
    """A plugin could not be imported, validated or registered."""


class SettingsError(PluginLoadError):
    """A setting cannot be read, or names a plugin that is not installed."""


class LockError(PluginLoadError):
    """The plugins are not those of the lock that the settings name, or the lock cannot be read.

    ``plugin`` is the first that differs, ``locked`` what the lock has of it, and ``differs`` what is there instead.
    """


class RulesWarning(UserWarning):
    """A checkpoint was saved by a program with other rules."""


# -- torch ------------------------------------------------------------------------------------------------------


class TorchPartError(ShardingError):
    """The installed torch lacks a part that is not public and that shardwise uses: ``part`` names it, ``torch`` the
    version.
    """


# -- processes -------------------------------------------------------------------------------------------------


class WorkerError(ShardingError):
    """A worker process raised, died or stopped answering."""


# -- measured link figures -------------------------------------------------------------------------------------


class LinksError(ShardingError):
    """The figures that ``shardwise calibrate`` measured cannot be used."""


class LinksFileError(LinksError):
    """The file of measured figures cannot be read or written, or is not a links file."""


class LinksVersionError(LinksError):
    """The file of measured figures was written by another version."""


class LinksFitError(LinksError):
    """The file of measured figures that the environment names has no figures for a mesh."""


# -- plans of whole steps --------------------------------------------------------------------------------------


class PlanError(ShardingError):
    """A plan of a whole step cannot be made or used."""


class MemoryPlanError(PlanError):
    """A step does not fit into the memory that it may take. ``limit`` has the bytes."""


class PlanFileError(PlanError):
    """A plan file, or the decisions beside it, cannot be read. ``path`` names it, and ``line`` the line, if any."""


class PlanVersionError(PlanFileError):
    """A plan file was written by another version."""


class PlanMeshError(PlanError):
    """A plan is for another mesh."""


class PlanFitError(PlanError):
    """A line of a plan fits nothing: the program or the module has changed. ``name`` is what it names."""


class PlanFitWarning(UserWarning):
    """A line of a plan fits nothing and is left out, because ``loose`` was asked for."""


# -- lockfiles of communication, and timelines -------------------------------------------------------------------


class LockFileError(ShardingError):
    """A lockfile of communication cannot be read. ``path`` names it, and ``line`` the line, if any."""


class LockVersionError(LockFileError):
    """A lockfile was written by another version, an earlier one where ``is_earlier`` says so."""


class LockFitError(LockFileError):
    """A lockfile is for another mesh, another type of devices or another program."""


class TimelineFileError(ShardingError):
    """A file is not a timeline that shardwise wrote. ``path`` names it."""


# -- checkpoints -----------------------------------------------------------------------------------------------


class CheckpointError(ShardingError):
    """A checkpoint could not be saved or loaded; every rank raises the same."""


class CheckpointKeyError(CheckpointError):
    """The state has a key that the checkpoint lacks."""


class CheckpointShapeError(CheckpointError):
    """A value of the state and the one in the checkpoint have different shapes, or only one of them is a tensor."""


class CheckpointDtypeError(CheckpointError):
    """A tensor of the state and the one in the checkpoint have different dtypes."""


class CheckpointValueError(CheckpointError):
    """A checkpoint cannot hold a value: to load it would not be safe, or would not give each rank its own value."""


class CheckpointFileError(CheckpointError):
    """A path has no complete checkpoint, or the checkpoint's files are damaged."""


class CheckpointStepError(CheckpointError):
    """A checkpoint has an earlier step than the last one of its directory."""


# -- where a warning points -------------------------------------------------------------------------------------


def warn_user(message: str, category: type[Warning], at: BaseException | None = None) -> None:
    """Warn at the line of the program that called shardwise, which is the one to look at; or at the line of another's
    code where an error was raised, such as a plugin's, if ``at`` comes from one.
    """
    import warnings  # only here: what is well needs none

    trace = at.__traceback__ if at is not None else None
    place: tuple[FrameType, int] | None = None
    while trace is not None:
        if not _is_between(trace.tb_frame):
            place = trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next
    if place is None:
        place = _users_place(currentframe())
    if place is None:  # no line of any program: a thread of ours, say
        warnings.warn(message, category, stacklevel=2)
        return
    frame, line = place
    module = str(frame.f_globals.get("__name__") or "<string>")
    # As warnings.warn does it: one line warns once, and modules are what a filter names.
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, frame.f_code.co_filename, line, module, registry)


def _users_place(frame: FrameType | None) -> tuple[FrameType, int] | None:
    """The innermost frame that is neither shardwise's nor torch's, and its line. What runs below a handler of an op,
    such as a lowering of a plugin, is not the program.
    """
    place: tuple[FrameType, int] | None = None
    while frame is not None:
        if frame.f_code.co_filename.startswith("<shardwise"):
            place = None
        elif place is None and not _is_between(frame):
            place = frame, frame.f_lineno
        frame = frame.f_back
    return place


_HERE = str(Path(__file__).parent) + os.sep
# The commands and the demo are programs that use the rest.
_PROGRAMS = tuple(_HERE + part + os.sep for part in ("cli", "demo"))
_BETWEEN = ("torch", "pluggy", "importlib", "contextlib", "functools", "threading")


def _is_between(frame: FrameType) -> bool:
    """Whether a frame is shardwise's own, or of what lies between it and a program."""
    file = frame.f_code.co_filename
    if file.startswith(_HERE):
        return not file.startswith(_PROGRAMS)
    module = str(frame.f_globals.get("__name__"))
    return file.startswith("<") or module.partition(".")[0] in _BETWEEN
