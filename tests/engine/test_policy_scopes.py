"""Where a policy is in force: scopes that end in another order, functions that run later than they are called, and what
is computed again, or anew, in a backward pass.
"""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise import Partial, Replicate, Shard
from shardwise.comm import policy  # the module: workers get other globals by value
from shardwise.comm.events import observe
from shardwise.errors import CommunicationError, SettingsError
from shardwise.testing import mesh

R = Replicate()


def on_two(shape, placement, seed=0):
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return sw.distribute_tensor(whole, mesh((2,), ("tp",)), [placement])


def pending():
    """A sum over the ranks that nobody has added up, which relu needs."""
    return on_two((4, 6), Shard(1)) @ on_two((6, 4), Shard(0))


def is_forbidden(run):
    kinds = []
    try:
        with observe(lambda event: kinds.append(event.kind)):
            run()
    except CommunicationError:
        assert not kinds, kinds
        return True
    assert kinds, "it had nothing to send"
    return False


# -- scopes that end in another order --------------------------------------------------------------------------------


def ends_in_another_order():
    def suspended():
        with sw.communication("forbid"):
            yield

    generator = suspended()
    next(generator)
    assert is_forbidden(pending().relu)
    with sw.communication("allow", over="tp"):
        generator.close()  # the outer scope ends inside of the inner one
        assert not is_forbidden(pending().relu)
    assert not is_forbidden(pending().relu), "a policy outlived its scope"
    outer, inner = sw.communication("allow"), sw.communication("forbid")
    outer.__enter__()
    with inner:
        outer.__exit__(None, None, None)
        assert is_forbidden(pending().relu), "the inner scope ended with the outer one"
    assert policy.in_force.stack == ()


def test_a_scope_takes_its_own_policy_back_and_no_other(two_ranks):
    two_ranks.run(ends_in_another_order)


def test_to_leave_what_was_not_entered_is_refused():
    with pytest.raises(SettingsError, match="this thread has not entered it"):
        sw.communication("forbid").__exit__(None, None, None)


# -- functions that run later than they are called ---------------------------------------------------------------------


def run_later():
    total = pending()

    @sw.communication("forbid")
    def generator():
        yield "first"
        yield total.relu()

    with closing(generator()) as steps:
        assert next(steps) == "first"
        assert not is_forbidden(pending().relu), "while it is suspended"
        assert is_forbidden(lambda: next(steps))

    @sw.communication("forbid")
    async def coroutine():
        await asyncio.sleep(0)
        return total.relu()

    async def beside():
        assert not is_forbidden(pending().relu)

    async def both():
        return await asyncio.gather(coroutine(), beside(), return_exceptions=True)

    error, _ = asyncio.run(both())
    assert isinstance(error, CommunicationError)
    assert policy.in_force.stack == ()


def test_a_policy_holds_while_a_decorated_generator_or_coroutine_runs(two_ranks):
    two_ranks.run(run_later)


def test_a_decorated_generator_is_the_generator_it_was():
    @sw.communication("forbid")
    def echo(times):
        """Says it."""
        for _ in range(times):
            try:
                heard = yield policy.in_force.stack
                if heard:
                    yield heard
            except KeyError:
                yield "caught"
        return "end"

    assert (echo.__name__, echo.__doc__) == ("echo", "Says it.")
    steps = echo(2)
    assert next(steps) == (sw.communication("forbid").policy,)
    assert policy.in_force.stack == ()
    assert steps.send("again") == "again"
    next(steps)
    assert steps.throw(KeyError()) == "caught"
    with pytest.raises(StopIteration) as ended:
        next(steps)
    assert ended.value.value == "end"
    steps = echo(1)
    next(steps)
    with pytest.raises(ValueError, match="mine"):
        steps.throw(ValueError("mine"))


def test_what_would_never_be_under_the_policy_is_not_decorated():
    with pytest.raises(SettingsError, match="it is a class"):
        sw.communication("forbid")(torch.nn.Linear)

    async def asynchronous():
        yield

    with pytest.raises(SettingsError, match="it is an asynchronous generator"):
        sw.communication("forbid")(asynchronous)


@pytest.mark.parametrize("over", [object(), 1.0, b"tp", {1.5}], ids=lambda value: type(value).__name__)
def test_what_is_no_mesh_dim_is_refused(over):
    with pytest.raises(SettingsError, match="names and numbers of mesh dims"):
        sw.communication("forbid", over=over)


# -- backward passes inside of backward passes -------------------------------------------------------------------------


def run_again():
    """The backward pass gathers a weight."""
    weight, x = on_two((4, 4), Shard(1)).requires_grad_(), on_two((4, 4), R, 1).requires_grad_()

    def layer(x):
        return (x * 2).exp() @ weight

    def twice(x):
        return checkpoint(layer, x * 1, use_reentrant=True)

    def loss_under(action, run):
        with sw.communication(action):
            y = checkpoint(run, x, use_reentrant=True)
            return y.redistribute(placements=[R], grad_placements=[Partial()]).sum()

    for run in (layer, twice):
        assert is_forbidden(loss_under("forbid", run).backward), "the forward pass was under forbid"
        loss = loss_under("allow", run)
        with sw.communication("forbid"):
            assert not is_forbidden(loss.backward)


def test_a_reentrant_checkpoint_is_judged_by_the_policies_of_its_forward_pass(two_ranks):
    two_ranks.run(run_again)


def allowed_inside(reentrant):
    x, weight = on_two((4, 6), Shard(1)).requires_grad_(), on_two((6, 4), Shard(0)).requires_grad_()

    def run(x):
        with sw.communication("allow"):
            y = (x @ weight).relu()
        return (y * 2).exp()

    with sw.communication("forbid"):
        loss = checkpoint(run, x, use_reentrant=reentrant).redistribute(placements=[R]).sum()
    assert not is_forbidden(loss.backward)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpointed_function_allows_is_allowed_when_it_runs_again(two_ranks, reentrant):
    two_ranks.run(allowed_inside, reentrant)


def entered_in_a_hook():
    seen = []

    def backward(inside, around):
        x = on_two((4, 4), R).requires_grad_()
        with sw.communication(around):
            y = x.exp()
            loss = y.sum()

        def hook(_):
            with sw.communication(inside):
                seen.append(is_forbidden(pending().relu))

        y.register_hook(hook)
        loss.backward()

    backward("forbid", "allow")
    backward("allow", "forbid")
    assert seen == [True, False]
    assert policy.in_force.stack == ()


def test_a_policy_that_is_entered_in_a_backward_pass_is_the_innermost(two_ranks):
    two_ranks.run(entered_in_a_hook)


def at_the_end_of_accumulate():
    weight, rows = on_two((6, 4), R).requires_grad_(), on_two((4, 6), Shard(0))
    with sw.communication("forbid", phases="gradients"):
        accumulating = sw.accumulate()
        accumulating.__enter__()
        (rows @ weight).redistribute(placements=[Shard(0)]).sum(1).backward(torch.ones(4, dtype=torch.float64))
        with pytest.raises(CommunicationError) as caught:
            accumulating.__exit__(None, None, None)
    assert caught.value.site[0].endswith("test_policy_scopes.py")


def test_the_line_of_a_context_is_that_of_the_program(two_ranks):
    two_ranks.run(at_the_end_of_accumulate)
