"""Losses and softmax, with reductions over a sharded batch that divide by global counts and weights."""
