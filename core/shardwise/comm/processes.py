"""Processes of this host, as others see them: whether they run, end, or have ended."""

from __future__ import annotations

import os
from pathlib import Path

from attrs import frozen

__all__ = ["Process"]

_OVER = ("Z", "X")  # the states of a process that has ended and whose status its parent has not read
_ENDS = 4  # PF_EXITING, a flag of the main thread: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
_STATE, _FLAGS, _BEGAN = 0, 6, 19  # fields of /proc/N/stat after the name


@frozen
class Process:
    """A process of this host by its number, and when it began: a number may be given to another process later."""

    number: int
    began: str

    @classmethod
    def of(cls, number: int) -> Process:
        """The process that has a number now."""
        return cls(number, _status(number)[_BEGAN])

    def is_gone(self) -> bool:
        """Whether it has ended."""
        try:
            os.kill(self.number, 0)
        except ProcessLookupError:
            return True
        except OSError:  # it is there and belongs to somebody else
            return False
        status = _status(self.number)
        return status[_STATE] in _OVER or status[_BEGAN] != self.began

    def is_ending(self) -> bool:
        """Whether its threads have ended or are about to, and the system has yet to close what it had open.

        False where the system does not say, and after the end.
        """
        status = _status(self.number)
        return status[_BEGAN] == self.began and bool(int(status[_FLAGS] or 0) & _ENDS)


def _status(number: int) -> list[str]:
    """The fields of a process that stand after its name; all are empty where the system does not say."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return [""] * (_BEGAN + 1)
    return text.rpartition(")")[2].split()  # the name before it may have spaces
