"""Names that rules for older torch releases import, in terms of the current ones."""

from __future__ import annotations

from typing import Any

from shardwise_dtensor import torch_private

__all__ = ["OutputSharding", "PlacementStrategy"]

#: The name of ``OpSpec`` up to torch 2.7.
PlacementStrategy = torch_private.OpSpec


class OutputSharding(torch_private.OutputSharding):
    """Torch's ``OutputSharding`` that also takes ``schema_suggestions`` and ``failed_reason``, as up to torch 2.3.

    The first suggestion counts, as it did there. A reason without an output or a suggestion is raised.
    """

    def __init__(
        self,
        output_spec: Any,
        redistribute_schema: Any = None,
        needs_redistribute: bool | str | None = False,
        use_val_from_redistribute_schema: bool = False,
        *,
        schema_suggestions: list[Any] | None = None,
        failed_reason: str | None = None,
    ) -> None:
        if isinstance(redistribute_schema, list):  # the older second argument
            schema_suggestions, redistribute_schema = redistribute_schema, None
        if isinstance(needs_redistribute, str):  # the older third argument
            failed_reason, needs_redistribute = needs_redistribute, False
        suggested = schema_suggestions[0] if schema_suggestions else redistribute_schema
        if failed_reason is not None and output_spec is None and suggested is None:
            raise ValueError(failed_reason)
        super().__init__(output_spec, suggested, bool(needs_redistribute), use_val_from_redistribute_schema)
