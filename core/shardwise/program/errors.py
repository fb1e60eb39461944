"""The errors of the solvers. They are about numbers and tables, so they are no sharding errors."""

from __future__ import annotations

__all__ = ["CostGraphError", "MissingSolverError", "ProgramError", "TableLimitError"]


class ProgramError(Exception):
    """Base of the errors of this package."""


class CostGraphError(ProgramError, ValueError):
    """A cost graph or a memory row is not well formed."""


class TableLimitError(ProgramError):
    """Exact elimination needs a table with more entries than the limit.

    ``entries`` is the size of the table, ``variable`` the one whose elimination needs it.
    """

    def __init__(self, variable: int, entries: int, limit: int) -> None:
        super().__init__(
            f"eliminating variable {variable} needs a table of {entries} entries, and the limit is {limit}. "
            "Raise the limit, or use solve, which fixes some variables in turns"
        )
        self.variable = variable
        self.entries = entries
        self.limit = limit

    def __reduce__(self) -> tuple[type[TableLimitError], tuple[int, int, int]]:
        return type(self), (self.variable, self.entries, self.limit)


class MissingSolverError(ProgramError, ImportError):
    """A proof asks for a solver of linear programs that is not installed."""
