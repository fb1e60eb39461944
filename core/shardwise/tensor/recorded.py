"""What ``make_fx`` writes into its graphs, of tensors that it records whole, where no op is called: one call each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

__all__ = ["RecordedCall"]


class RecordedCall:
    """A call that moves a tensor between layouts, or into a mesh or out of it, as a function in a graph of ``make_fx``.

    A graph holds arguments that it can write; layouts are none.
    """

    def __init__(self, name: str, run: Callable[..., Any], *how: Any) -> None:
        self.__name__ = self.__qualname__ = name
        self.run = run
        self.how = how

    def __call__(self, tensor: Any) -> Any:
        """Make the call."""
        return self.run(tensor, *self.how)

    def __deepcopy__(self, _memo: Any) -> Self:
        # It does not change, and a mesh cannot be copied where there is no data.
        return self
