"""The shelf ``private_torch.autograd_nodes``: each function has a test that fails clearly when torch takes it away."""

from __future__ import annotations

import torch

from shardwise.private_torch import autograd_nodes


def test_nodes_have_the_numbers_of_the_forward_calls_that_made_them():
    x = torch.ones(2, requires_grad=True)
    before = autograd_nodes.sequence_number()
    y = x * 2
    after = autograd_nodes.sequence_number()
    assert (before, after) == (y.grad_fn._sequence_nr(), y.grad_fn._sequence_nr() + 1)


def test_the_node_that_runs_is_known_from_inside():
    seen, leaf = [], []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: leaf.append(autograd_nodes.running_node()))
    y = x * 2
    y.register_hook(lambda _: seen.append((autograd_nodes.running_node(), autograd_nodes.backward_number())))
    y.sum().backward()
    ((number, backward),) = seen
    assert number == y.grad_fn._sequence_nr()
    assert backward >= 0
    assert leaf == [None]
    assert (autograd_nodes.running_node(), autograd_nodes.backward_number()) == (None, -1)


def test_the_end_of_a_backward_pass_can_be_waited_for():
    order = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda _: order.append("leaf"))
    y = x * 2
    y.register_hook(lambda _: autograd_nodes.at_end_of_backward(lambda: order.append("end")))
    y.sum().backward()
    assert order == ["leaf", "end"]


def test_the_nodes_around_a_backward_pass_inside_of_another_are_known():
    seen = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                y = torch.ones(2, requires_grad=True) * 3
                y.register_hook(lambda _: seen.append(list(autograd_nodes.outer_nodes())))
                y.sum().backward()
            return grad * 2

    y = Again.apply(torch.ones(2, requires_grad=True))
    y.sum().backward()
    assert seen == [[y.grad_fn._sequence_nr()]]
    assert list(autograd_nodes.outer_nodes()) == []
