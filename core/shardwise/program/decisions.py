"""Decisions: which rows each call of a step takes and where its results rest, by a digest that any run can compute.

A digest is of the op, its static arguments and the tags of its operands (:mod:`shardwise.kernel.tags`). The first
look-up is with the sizes of the call. A call that is known but for its sizes takes the decision without them, if it is
legal for these sizes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import field, frozen

from shardwise.errors import ShardingError
from shardwise.kernel.foreign_files import reason, short
from shardwise.kernel.placements import parse_placement, show
from shardwise.kernel.plurals import counted
from shardwise.kernel.schema import OpSchema
from shardwise.kernel.tags import DEPTH, Tag, call_digest
from shardwise.program.step_graph import Places

__all__ = ["Decision", "Decisions"]

Layouts = tuple[Places | None, ...]

_KEYS = frozenset({"format", "mesh", "depth", "exact", "loose", "left", "digest"})

_DEEPEST = 64
"""Tags of a file that somebody made may not cost more than this."""


@frozen
class Decision:
    """The layouts in which a call finds its operands, uses them and makes its results, and where the results rest.

    Tensors are flat. A strided shard counts its factor in the whole dim, as in rows.
    """

    sources: Layouts
    inputs: Layouts
    outputs: Layouts
    rests: Layouts

    @property
    def moves_results(self) -> bool:
        """Whether a result rests elsewhere than its row leaves it."""
        return self.rests != self.outputs


@frozen(eq=False)
class Decisions:
    """The decisions of one program on meshes of one shape, by digest with sizes and without them."""

    mesh_shape: tuple[int, ...]
    exact: Mapping[int, tuple[Decision, ...]]
    loose: Mapping[int, tuple[Decision, ...]] = field(factory=dict)
    depth: int = DEPTH
    #: Digests of calls that were recorded and left as they are: there is nothing to decide about them.
    left: frozenset[int] = frozenset()

    def leaves(self, schema: OpSchema, tags: Sequence[Tag | None]) -> bool:
        """Whether a call without a decision was recorded."""
        return any(
            (digest := call_digest(schema, tags, sizes=sizes)) in self.left or digest in known
            for sizes, known in ((True, self.exact), (False, self.loose))
        )

    def find(self, schema: OpSchema, tags: Sequence[Tag | None], layouts: Layouts) -> Decision | None:
        """The decision about a call whose operands have these tags and layouts.

        If it was decided on for other layouts only, that holds too, unless the results are views: a view of a moved
        tensor is a copy.
        """
        known = self.exact.get(call_digest(schema, tags, sizes=True))
        known = known if known is not None else self.loose.get(call_digest(schema, tags, sizes=False), ())
        for decision in known:
            if decision.sources == layouts:
                return decision
        is_view = any(r.alias is not None and not r.written for r in schema.signature.results)
        return known[0] if known and not is_view else None

    def find_exact(self, schema: OpSchema, tags: Sequence[Tag | None], layouts: Layouts) -> Decision | None:
        """The decision about a call of these sizes whose operands have these tags and layouts."""
        known = self.exact.get(call_digest(schema, tags, sizes=True), ())
        return next((decision for decision in known if decision.sources == layouts), None)

    def updated(self, later: Decisions) -> Decisions:
        """These decisions and later ones, which win. Tags of another depth are not comparable: then the later alone."""
        if (later.mesh_shape, later.depth) != (self.mesh_shape, self.depth):
            return later
        exact, loose = {**self.exact, **later.exact}, {**self.loose, **later.loose}
        return Decisions(self.mesh_shape, exact, loose, self.depth, self.left | later.left)

    def __len__(self) -> int:
        return sum(map(len, self.exact.values()))

    # -- as text -------------------------------------------------------------------------------------------------

    def as_json(self) -> dict[str, Any]:
        """Plain data: the same text on every machine. Its digest tells data that was changed."""
        return {**self._data(), "digest": self.fingerprint}

    def _data(self) -> dict[str, Any]:

        def layouts(of: Layouts) -> list[str | None]:
            return [None if places is None else ",".join(map(show, places)) for places in of]

        def table(of: Mapping[int, tuple[Decision, ...]]) -> dict[str, Any]:
            return {
                f"{digest:016x}": [[layouts(part) for part in (d.sources, d.inputs, d.outputs, d.rests)] for d in known]
                for digest, known in sorted(of.items())
            }

        return {
            "format": 1,
            "mesh": list(self.mesh_shape),
            "depth": self.depth,
            "exact": table(self.exact),
            "loose": table(self.loose),
            "left": [f"{digest:016x}" for digest in sorted(self.left)],
        }

    @classmethod
    def from_json(cls, data: Any) -> Decisions:
        """From :meth:`as_json`. Raises :class:`ShardingError` for anything else.

        Data without a digest is taken as it is: earlier releases wrote none.
        """
        try:
            read = cls._read(data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ShardingError(
                asked="read decisions",
                found=f"the data is not what this library writes ({reason(error)})",
                do="Learn or plan the program again.",
            ) from error
        if data.get("digest", read.fingerprint) != read.fingerprint:
            raise ShardingError(
                asked="read decisions",
                found="their digest is another one: they were changed after they were written",
                do="Learn or plan the program again.",
            )
        return read

    @classmethod
    def _read(cls, data: Any) -> Decisions:
        if type(data["format"]) is not int or data["format"] != 1:
            raise ShardingError(
                asked="read decisions",
                found=f"their format is {short(repr(data['format']))}, and this release reads 1",
                do="Learn or plan the program again with this release.",
            )
        mesh, depth = _mesh_and_depth(data)
        if unknown := sorted(data.keys() - _KEYS):
            raise ValueError(f"nothing in decisions is called {short(unknown[0])!r}")

        def layouts(of: Sequence[str | None]) -> Layouts:
            return tuple(None if text is None else _places(text, len(mesh)) for text in of)

        def table(of: Mapping[str, Any]) -> dict[int, tuple[Decision, ...]]:
            return {
                int(digest, 16): tuple(Decision(*map(layouts, parts)) for parts in known)
                for digest, known in of.items()
            }

        left = frozenset(int(digest, 16) for digest in data["left"])
        return cls(mesh, table(data["exact"]), table(data["loose"]), depth, left)

    @property
    def fingerprint(self) -> str:
        """A digest of all decisions."""
        return hashlib.sha256(json.dumps(self._data(), sort_keys=True).encode()).hexdigest()[:16]


def _mesh_and_depth(data: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    mesh, depth = tuple(map(int, data["mesh"])), int(data["depth"])
    if not mesh or min(mesh) < 1 or not 0 <= depth <= _DEEPEST:
        raise ValueError(f"a mesh of shape {mesh} and tags of depth {depth}")
    return mesh, depth


def _places(text: str, ndim: int) -> Places:
    parts, depth, start = [], 0, 0
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append(text[start:i])
            start = i + 1
    places = tuple(parse_placement(part) for part in [*parts, text[start:]] if part)
    if len(places) != ndim:
        raise ValueError(f"{text!r} are placements for another mesh than one of {counted(ndim, 'dim')}")
    return places
