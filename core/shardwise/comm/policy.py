"""Policies: what a program may send without saying so, ``with shardwise.communication("forbid"):``.

A collective is explicit where the program asks for it (``redistribute``, ``full_tensor``, a plan file), and implicit
where an op needs it. Policies are about implicit ones. They are looked at where a call would send something, and by no
other call: see :mod:`shardwise.engine.judging`.
"""

from __future__ import annotations

import functools
import gc
import inspect
import threading
import types
from bisect import bisect_right
from collections.abc import Generator, Iterator, MutableMapping, Sequence
from contextlib import ContextDecorator, contextmanager
from functools import cache
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from attrs import define, evolve, field
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.policy_text import ACTIONS, Policy, checked_policy, parse_policies
from shardwise.errors import SettingsError, TracingError
from shardwise.kernel.dispatcher import drop_plans
from shardwise.kernel.mesh import Mesh
from shardwise.private_torch.autograd_nodes import backward_number, outer_nodes, running_node, sequence_number
from shardwise.private_torch.dispatch import in_backward
from shardwise.private_torch.tracing import constant_in_graphs, graph_that_is_made
from shardwise.settings import read_settings

__all__ = [
    "InForceThen",
    "PolicyScope",
    "check_mesh_dims",
    "communication",
    "hold_for_graph",
    "in_force",
    "know_mesh",
    "no_policies",
    "number_of_scope",
    "policies_now",
    "start_by_settings",
]

# -- what is in force ------------------------------------------------------------------------------------------------

Stack = tuple[Policy, ...]
# Threads whose scopes are remembered: a thread may end before the backward pass of what it has computed.
_MOST_THREADS = 256
# Scopes that are noted for backward passes to come. Of older ones the settings' policies hold.
_MOST_NOTED = 1 << 16


class InForceThen:
    """The policies that a compiled graph was made under. They are no part of a layout, so two are always equal; the
    graph's guard looks at ``stack``.
    """

    __slots__ = ("stack",)

    def __init__(self, stack: Stack) -> None:
        self.stack = stack

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InForceThen)

    def __hash__(self) -> int:
        return hash(InForceThen)

    def __deepcopy__(self, memo: dict[int, Any]) -> InForceThen:
        return self

    def __reduce__(self) -> Any:
        return InForceThen, (self.stack,)


@define(eq=False)
class _Scopes:
    """The policies that one thread has entered: those in force, and those that were, by the number of the first node of
    their scope. Autograd numbers the nodes of each thread by themselves.
    """

    stack: Stack = ()
    _starts: list[int] = field(factory=list)
    _stacks: list[Stack] = field(factory=list)

    def enter(self, stack: Stack) -> None:
        """Have other policies from here on."""
        self.stack = stack
        number = sequence_number()
        if self._starts and self._starts[-1] >= number:
            self._stacks[-1] = stack
            return
        if len(self._starts) >= _MOST_NOTED:
            del self._starts[: _MOST_NOTED // 2], self._stacks[: _MOST_NOTED // 2]
        self._starts.append(number)
        self._stacks.append(stack)

    def at_node(self, number: int | None) -> Stack | None:
        """The policies in force when this thread made the node with a number, now without one; None before all."""
        if number is None:
            return self.stack
        at = bisect_right(self._starts, number) - 1
        return self._stacks[at] if at >= 0 else None


class _Here(threading.local):
    """What one thread has: a thread that a program starts inherits no policies, as it inherits no mode of torch."""

    scopes: _Scopes | None = None
    then: InForceThen | None = None
    is_suspended: bool = False


@define
class _InForce:
    """The policies in force, outermost first, by thread.

    ``is_on`` stays true from the first policy on: plans that are made from then on know what they send.
    """

    is_on: bool = False
    settings: Stack = ()
    mesh_dims: set[str | int] = field(factory=set)
    _here: _Here = field(factory=_Here)
    _everywhere: list[_Scopes] = field(factory=list)

    @property
    def is_suspended(self) -> bool:
        """Whether this thread judges nothing now."""
        return self._here.is_suspended

    @is_suspended.setter
    def is_suspended(self, value: bool) -> None:
        self._here.is_suspended = value

    @property
    def stack(self) -> Stack:
        """Those of this thread."""
        scopes = self._here.scopes
        return self.settings if scopes is None else scopes.stack

    @property
    def then(self) -> InForceThen:
        """The same, for a graph that is made now."""
        then = self._here.then
        return InForceThen(self.settings) if then is None else then

    def enter(self, stack: Stack) -> None:
        """Have other policies in this thread from here on."""
        if not self.is_on:
            self.is_on = True
            drop_plans()
        if self._here.scopes is None:
            self._here.scopes = _Scopes()
            self._everywhere.append(self._here.scopes)
            del self._everywhere[:-_MOST_THREADS]
        self._here.scopes.enter(stack)
        self._here.then = InForceThen(stack)

    def at_node(self, number: int | None) -> Stack:
        """The policies in force when autograd made the node with this number, which runs in this thread.

        A node that this thread cannot have made is one of a thread that has entered policies; of several such threads
        the one with the strictest policy counts. Nothing says which thread made a node.
        """
        scopes = self._here.scopes
        is_not_made_here_yet = number is not None and number >= sequence_number()
        if is_not_made_here_yet or (scopes is None and _is_in_autograds_thread()):
            stacks = [stack for one in self._everywhere if (stack := one.at_node(number)) is not None]
            return max(stacks, key=_strictness, default=self.settings)
        stack = None if scopes is None else scopes.at_node(number)
        return self.settings if stack is None else stack

    def at_running_node(self) -> Stack:
        """The policies for what runs in a backward pass: those of its forward op, then those that were entered in the
        backward pass itself, as in a function that a checkpoint runs again.

        A node that was made in the backward function of another one, and runs there, has the policies of that one.
        """
        number, now = running_node(), backward_number()
        stack = self.at_node(number)
        outermost = number if number is None else min((number, *outer_nodes()))
        if outermost != number:
            stack = (*self.at_node(outermost), *(policy for policy in stack if policy.of_backward != -1))
        entered = [policy for policy in self.stack if policy.of_backward == now]
        return (*stack, *(policy for policy in entered if not any(policy is one for one in stack)))


def _is_in_autograds_thread() -> bool:
    """Whether autograd started this thread, which has entered no policies and made no nodes."""
    return threading.get_ident() not in {thread.ident for thread in threading.enumerate()}


def _strictness(stack: Stack) -> int:
    return max((ACTIONS.index(policy.action) for policy in stack), default=-1)


in_force = _InForce()


@cache
def start_by_settings() -> None:
    """Take the policies of the settings, once."""
    texts = read_settings().communication
    if texts:
        where = read_settings().source("communication")
        inner, in_force.settings = in_force.stack, parse_policies(texts, f"read {where}")
        in_force.enter((*in_force.settings, *inner))


def know_mesh(mesh: Mesh) -> None:
    """Note the names and numbers of a mesh's dims, so that a policy over one that no mesh has is an error."""
    in_force.mesh_dims.update(getattr(mesh, "mesh_dim_names", None) or (), range(mesh.ndim))


def check_mesh_dims(policy: Policy, asked: str) -> None:
    """Raise :class:`SettingsError` for a mesh dim that no mesh of this process has: the policy would hold for nothing,
    and nobody would know. ``asked`` is what is done under the policy.
    """
    over = policy.over or ()
    if all(dim in in_force.mesh_dims for dim in over):
        return
    # A submesh is met, and the mesh that it was cut from is not, nor is one that the program uses later.
    for mesh in [one for one in gc.get_objects() if issubclass(type(one), DeviceMesh)]:
        know_mesh(mesh)
    unknown = [dim for dim in over if dim not in in_force.mesh_dims]
    if unknown:
        there = [dim for dim in in_force.mesh_dims if type(dim) is type(unknown[0])]
        raise SettingsError(
            asked=f"{asked} the policy {str(policy)!r}",
            found=f"no mesh has a dim {unknown[0]!r}; there are {', '.join(map(str, sorted(there))) or 'no names'}",
            do="Correct it: give the name or the number of a mesh dim.",
            setting="communication",
        )


def policies_now() -> tuple[Stack, bool]:
    """The policies that hold for what runs now, and whether that is a backward pass: those of its forward op then."""
    if in_force.is_suspended:
        return (), False
    traced = _of_graphs.get(graph) if _of_graphs and (graph := graph_that_is_made()) is not None else ()
    if not in_backward():
        return (*in_force.stack, *(traced or ())), False
    return (*in_force.at_running_node(), *(traced or ())), True


@contextmanager
def no_policies() -> Iterator[None]:
    """Judge nothing meanwhile: what runs is a question, and not the program."""
    before, in_force.is_suspended = in_force.is_suspended, True
    try:
        yield
    finally:
        in_force.is_suspended = before


# By the graph that is being made: the policies of modules whose forward pass is in it.
_of_graphs: MutableMapping[Any, Stack] = WeakKeyDictionary()
# Scopes of modules by number: dynamo passes numbers to a function that it calls while it makes a graph.
_of_modules: list[PolicyScope] = []


@constant_in_graphs
def hold_for_graph(number: int) -> None:
    """Have a policy of a module hold for the whole graph that is being made."""
    graph, scope = graph_that_is_made(), _of_modules[number]
    if graph is not None:
        in_force.is_on = True
        _of_graphs[graph] = (*_of_graphs.get(graph, ()), scope.policy)


def number_of_scope(scope: PolicyScope) -> int:
    """A number under which :func:`hold_for_graph` finds a scope."""
    _of_modules.append(scope)
    return len(_of_modules) - 1


class _Entered(threading.local):
    """By thread, the policies that a scope has put in force and not taken back, once for each time it was entered."""

    policies: Stack = ()


class PolicyScope(ContextDecorator):
    """A policy as a context: see :func:`communication`. It may be entered several times, one inside the other."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._entered = _Entered()

    def __call__(self, function: Any) -> Any:
        """The function with the policy in force while its own code runs: that of a generator or a coroutine runs after
        the call, and not while it is suspended.
        """
        if isinstance(function, type) or inspect.isasyncgenfunction(function):
            what = "a class" if isinstance(function, type) else "an asynchronous generator"
            raise SettingsError(
                asked=f"decorate {getattr(function, '__qualname__', function)} with {self!r}",
                found=f"it is {what}, whose code does not run in the call",
                do="Decorate a function, a method, a generator or a coroutine. A module's policy is an argument of "
                "distribute_module.",
                setting="communication",
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                return await _resumed(self, function(*args, **kwargs))

            return awaited
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def iterated(*args: Any, **kwargs: Any) -> Any:
                return (yield from _resumed(self, function(*args, **kwargs)))

            return iterated
        return super().__call__(function)

    def __enter__(self) -> Self:
        if torch.compiler.is_compiling():
            _refuse_in_a_graph(self.policy.action)
        start_by_settings()
        # An object of its own: the one that is taken back.
        entered = evolve(self.policy, of_backward=backward_number())
        self._entered.policies = (*self._entered.policies, entered)
        in_force.enter((*in_force.stack, entered))
        return self

    def __exit__(self, *_: object) -> None:
        if not self._entered.policies:
            raise SettingsError(
                asked=f"leave {self!r}",
                found="this thread has not entered it",
                do="Enter and leave it in one thread, by a with statement.",
                setting="communication",
            )
        *rest, gone = self._entered.policies
        self._entered.policies = tuple(rest)
        # A generator may leave its scope after scopes that were entered later, or before them. They stay.
        in_force.enter(tuple(policy for policy in in_force.stack if policy is not gone))

    def __repr__(self) -> str:
        return f"communication({str(self.policy)!r})"


@types.coroutine
def _resumed(scope: PolicyScope, running: Any) -> Generator[Any, Any, Any]:
    """Yield what a generator or a coroutine yields, and give what it returns, with a policy in force while it runs."""
    resume = functools.partial(running.send, None)
    try:
        while True:
            with scope:
                try:
                    given = resume()
                except StopIteration as stop:
                    return stop.value
            try:
                resume = functools.partial(running.send, (yield given))
            except GeneratorExit:
                raise
            except BaseException as error:  # noqa: BLE001  # whatever the caller throws in is the generator's to handle
                resume = functools.partial(running.throw, error)
    finally:
        with scope:
            running.close()


@constant_in_graphs
def _refuse_in_a_graph(action: str) -> None:
    raise TracingError(
        asked=f"enter a policy {action!r} in compiled code",
        found="a graph is made once, and its calls are judged while it is made",
        do="Enter it around the call of the compiled function.",
    )


def communication(
    policy: str,
    *,
    over: Sequence[str | int] | str | int | None = None,
    kinds: Sequence[str] | str | None = None,
    above: int = 0,
    phases: Sequence[str] | str | None = None,
) -> PolicyScope:
    """A context that says what becomes of implicit communication: ``"allow"``, ``"warn"`` or ``"forbid"``.

    ``policy`` may also be the whole policy as settings write it: ``"forbid over tp above 1MiB"``.

    Implicit is what an op needs and nobody wrote: a gathered operand, a reduced sum, what a rule's own lowering sends.
    Calls of ``redistribute``, ``full_tensor`` and the like, and what a plan file says, are explicit, and no policy is
    about them. The policy is about all implicit collectives, or about those that

    - run over one of the mesh dims ``over``, by name or number;
    - are of one of ``kinds``: ``all_gather``, ``all_reduce``, ``all_to_all``, ``reduce_scatter``, ``shift``;
    - take more than ``above`` bytes of a rank;
    - belong to one of ``phases``: ``forward``, ``backward`` and ``optimizer``, which are the default, and
      ``gradients``: the sum of a leaf's gradient over the mesh, which the layout of the leaf asks for.

    Of several contexts, the innermost that is about a collective holds. **A backward pass is judged by the contexts of
    the forward op**, wherever ``backward()`` is called. Under ``"forbid"`` a call raises :class:`CommunicationError` on
    every rank before anything is sent; under ``"warn"`` each line of the program gives one
    :class:`CommunicationWarning`. No policy changes a number.

    The context holds for the thread that enters it, as torch's own modes do; a thread that is started inside has the
    policies of the settings. A backward pass that runs in a thread which has entered no context, as autograd's own
    threads have not, is judged by those of the thread that made its forward pass. Every rank must enter and leave a
    context at the same points. Compiled code is judged when it is made, and made anew under other
    policies. Raises :class:`SettingsError` for values that it does not take.
    """
    if torch.compiler.is_compiling():
        _refuse_in_a_graph(policy)
    return PolicyScope(checked_policy(policy, over, kinds, above, phases, "set a policy on communication"))
