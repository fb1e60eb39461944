"""The errors of shardwise, one type per cause.

Every error says three things: what was *asked*, what was *found*, and what to *do*. Programs can read the same facts,
and the values behind them, from attributes.
"""

from __future__ import annotations

from typing import Any


class ShardingError(RuntimeError):
    """Base of all errors that shardwise raises on purpose.

    ``asked``, ``found`` and ``do`` are the three sentences of the message; every other keyword is stored in
    ``fields`` and can be read as an attribute.
    """

    def __init__(self, *, asked: str, found: str, do: str, **fields: Any) -> None:
        super().__init__(f"{asked}: {found}. {do}")
        self.asked = asked
        self.found = found
        self.do = do
        self.fields = fields

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


# -- layouts ---------------------------------------------------------------------------------------------------


class PlacementError(ShardingError):
    """A placement that the tensor cannot have: a shard dim out of range, an unknown reduction."""


class PlacementCountError(PlacementError):
    """The number of placements is not the number of mesh dims."""


class LayoutError(ShardingError):
    """A layout that shardwise's placements cannot express, or a local tensor that does not fit its layout."""


class MeshMismatchError(ShardingError):
    """Operands of one op lie on different meshes."""


class DeviceMismatchError(ShardingError):
    """A tensor lies on another device type than the mesh."""


class PlainTensorError(ShardingError):
    """A plain tensor met a MeshTensor in one op."""


# -- ops -------------------------------------------------------------------------------------------------------


class NoRuleError(ShardingError):
    """No installed plugin has a rule for the op."""


class UnknownOpWarning(UserWarning):
    """An op without a rule runs on whole tensors on every rank, because the program asked for that."""


class CallError(ShardingError):
    """A call that the op's schema does not allow: an argument is missing, unknown or of the wrong kind."""


class NoStrategyError(ShardingError):
    """The op has a rule, but none of its rows is legal for this call."""


class InPlaceError(NoStrategyError):
    """The tensor that an in-place or ``out=`` op writes cannot keep its placements."""


class ViewError(NoStrategyError):
    """A view would need data from another rank."""


class ItemError(ShardingError):
    """``.item()`` was called on a tensor that does not have exactly one element."""


class ListLengthError(ShardingError):
    """Tensor lists that are zipped (foreach, fused) have unequal lengths."""


class TracingError(ShardingError):
    """Something that ``torch.compile`` cannot put into a graph, because it depends on data of other ranks."""


class RankDisagreementError(ShardingError):
    """Ranks of one mesh do not agree on something that they must agree on."""


# -- rules and plugins -----------------------------------------------------------------------------------------


class RuleError(ShardingError):
    """A rule is malformed. The error is raised when the rule is created, or at the first call that it does not fit."""


class NotationError(RuleError):
    """A notation string is malformed."""


class RuleArgumentError(RuleError):
    """A rule names an argument that its op lacks."""


class RuleConflictError(ShardingError):
    """Two plugins supply a rule for one op and nothing says which wins."""


class PluginLoadError(ShardingError):
    """A plugin could not be imported, validated or registered."""


class SettingsError(PluginLoadError):
    """A setting cannot be read, or names a plugin that is not installed."""


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


# -- checkpoints -----------------------------------------------------------------------------------------------


class CheckpointError(ShardingError):
    """A checkpoint could not be saved or loaded; every rank raises the same."""


class CheckpointKeyError(CheckpointError):
    """The state asks for something that the checkpoint does not have."""


class CheckpointShapeError(CheckpointError):
    """A tensor of the state and the one in the checkpoint have different shapes, or one of the two is not a tensor."""


class CheckpointDtypeError(CheckpointError):
    """A tensor of the state and the one in the checkpoint have different dtypes."""


class CheckpointValueError(CheckpointError):
    """A value that a checkpoint cannot hold: loading it would not be safe, or would not give every rank its own."""


class CheckpointFileError(CheckpointError):
    """There is no complete checkpoint where one was asked for, or its files are damaged."""


class CheckpointStepError(CheckpointError):
    """A checkpoint of an earlier step than the last one of its directory."""
