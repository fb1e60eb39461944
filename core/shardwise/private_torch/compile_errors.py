"""Errors that torch meets while it compiles: a program catches them by the class that raised them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from shardwise.errors import ShardingError
from shardwise.private_torch.imports import when_imported
from shardwise.private_torch.parts import find_part

__all__ = ["raise_as_they_are"]

_CATCHES = "torch._dynamo.convert_frame.CatchErrorsWrapper"
_WRAPPERS = ("TorchRuntimeError", "BackendCompilerFailed", "InternalTorchDynamoError", "UserError")


def raise_as_they_are(cls: type[ShardingError]) -> None:
    """Have errors of a class come out of compiled functions as they are, with dynamo's own error as their cause.

    Dynamo makes another error of each, of one of four classes of its own, so that ``except`` does not find it. It
    tells nobody which errors to leave. Without its function the wrapped error comes, with the text of the original.
    To what is raised in the middle of its own work it also adds words, and they are taken away.

    Code that dynamo traces raises such an error, too, and there it only says that it cannot trace how the error is
    made. Such a call runs as it is, so that it raises. Nothing has run before: dynamo only traces.
    """
    when_imported("torch._dynamo.convert_frame", lambda module: _raise_as_they_are(module, cls))


def _raise_as_they_are(module: Any, cls: type[ShardingError]) -> None:
    catches = find_part(_CATCHES)
    if catches is None:
        return
    compile_frame = catches.__call__
    wrappers = tuple(w for name in _WRAPPERS if (w := getattr(module.exc, name, None)) is not None)

    unsupported = getattr(module.exc, "Unsupported", ())
    as_it_is = _run_as_it_is()

    def compile_or_raise(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return compile_frame(self, *args, **kwargs)
        except wrappers as error:
            inside = next((e for e in _inside(error, wrappers) if isinstance(e, cls)), None)
            if inside is None:
                raise
            if not module.config.verbose:  # as dynamo does: its own calls tell a program nothing
                inside.__traceback__ = error.__traceback__ = None
            inside.args = (inside.message,)
            raise inside from error
        except unsupported as error:
            inside = next((e for e in _causes(error) if isinstance(e, cls)), None)
            if inside is not None:
                raise inside from error
            if as_it_is is None or not _makes(error, cls):
                raise
            return as_it_is()

    catches.__call__ = compile_or_raise


def _run_as_it_is() -> Callable[[], Any] | None:
    """What tells torch to run a call as it is, with the calls in it, and to compile the next one."""
    parts: list[Any] = [find_part(name) for name in _RUNS]
    if None in parts:
        return None
    answer, strategy, skip = parts
    return lambda: answer(frame_exec_strategy=strategy(skip, skip), apply_to_code=False)


_RUNS = (
    "torch._dynamo.types.ConvertFrameReturn",
    "torch._C._dynamo.eval_frame._FrameExecStrategy",
    "torch._C._dynamo.eval_frame._FrameAction.SKIP",
)


def _makes(error: Any, cls: type[BaseException]) -> bool:
    """Whether dynamo ended where a program made an error of a class."""
    stack = getattr(error, "real_stack", None) or [None]
    code = cls.__init__.__code__  # a class with an __init__ of its own
    return stack[-1] is not None and (stack[-1].filename, stack[-1].name) == (code.co_filename, code.co_name)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _inside(error: BaseException, wrappers: tuple[type[BaseException], ...]) -> Iterator[BaseException]:
    """The errors that one was made of, the last first.

    Dynamo hides what it wraps, and the error is in the context alone. In the context of another error is what somebody
    was handling then: it is not what failed.
    """
    following: Any = error
    while following is not None:
        yield following
        hidden = following.__context__ if isinstance(following, wrappers) else None
        following = getattr(following, "inner_exception", None) or following.__cause__ or hidden
