"""What the oracle counted, and the refusal that it raises."""

from __future__ import annotations

from attrs import field, frozen
from rich.table import Table

from shardwise.errors import ShardingError
from shardwise.kernel.plurals import counted

__all__ = ["Report", "RuleRefuted"]


class RuleRefuted(ShardingError, AssertionError):  # noqa: N818  it is a verdict
    """A rule gives a wrong result, or raises where one device gives a result.

    Fields: ``op``, ``source`` (file and line of the rule), ``rows`` (the rows in force, one per mesh dim), ``mesh``,
    ``sample`` (the call) and ``placements``.
    """


@frozen
class Report:
    """Counts of rules, ops, rows and cases, and everything that the oracle could not judge.

    ``rows`` counts the distinct rows that ran per op, ``left`` the rows that did not apply to some call.
    ``unexercised`` rows never ran, ``unsampled`` ops have no legal sample on this machine.
    """

    rules: int = 0
    ops: int = 0
    rows: int = 0
    cases: int = 0
    left: int = 0
    unexercised: tuple[str, ...] = ()
    unsampled: tuple[str, ...] = ()
    refuted: tuple[RuleRefuted, ...] = field(default=(), repr=False)

    def __add__(self, other: Report) -> Report:
        return Report(
            self.rules + other.rules,
            self.ops + other.ops,
            self.rows + other.rows,
            self.cases + other.cases,
            self.left + other.left,
            self.unexercised + other.unexercised,
            self.unsampled + other.unsampled,
            self.refuted + other.refuted,
        )

    def table(self, title: str = "Oracle") -> Table:
        """The counts, then what was not judged."""
        table = Table(title=title, show_header=False)
        for name in ("rules", "ops", "rows", "cases", "left"):
            table.add_row(name, str(getattr(self, name)))
        for name in ("unexercised", "unsampled", "refuted"):
            listed = getattr(self, name)
            table.add_row(name, "\n".join(map(str, listed)) or "none")
        return table

    def __str__(self) -> str:
        return (
            f"{counted(self.rules, 'rule')}, {counted(self.ops, 'op')}, {counted(self.rows, 'row')}, "
            f"{counted(self.cases, 'case')}; {counted(len(self.unexercised), 'row')} unexercised, "
            f"{counted(len(self.unsampled), 'op')} unsampled, "
            f"{len(self.refuted)} refuted"
        )
