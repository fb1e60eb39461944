"""Libraries that find an array's functions in the package of its class, as opt_einsum does."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

import shardwise as sw
from shardwise import MeshTensor, Replicate, Shard
from shardwise.testing import mesh

A = torch.linspace(-1, 2, 24, dtype=torch.float64).view(4, 2, 3)
B = torch.linspace(3, -2, 15, dtype=torch.float64).view(3, 5)


def package_of(x):
    """As they do: the first word of the module of the class."""
    return import_module(type(x).__module__.partition(".")[0])


def chain(of):
    """A contraction with each of the functions, as opt_einsum calls them."""

    def run(a, b):
        c = package_of(of(a)).tensordot(of(a), of(b), axes=((2,), (0,)))
        d = package_of(c).transpose(c, (2, 0, 1))
        return package_of(d).einsum("kij,ijl->kl", d, of(a)), package_of(d).transpose(d)

    return run


def compared(run_alone, run_on_mesh, on):
    for places in ((Shard(0), Replicate()), (Shard(2), Shard(0)), (Replicate(), Shard(1))):
        alone = [t.clone().requires_grad_() for t in (A, B)]
        spread = [
            sw.distribute_tensor(t, on, [place]).requires_grad_() for t, place in zip((A, B), places, strict=True)
        ]
        expected, found = run_alone(*alone), run_on_mesh(*spread)
        sum(t.square().sum() for t in expected).backward()
        sum(t.square().sum() for t in found).backward()
        for one, other in zip(expected, found, strict=True):
            assert isinstance(other, MeshTensor)
            torch.testing.assert_close(other.full_tensor(), one)
        for one, other in zip(alone, spread, strict=True):
            torch.testing.assert_close(other.grad.full_tensor(), one.grad)


def found_by_the_module_of_the_class():
    def alone(a, b):
        d = torch.tensordot(a, b, dims=((2,), (0,))).permute(2, 0, 1)
        return torch.einsum("kij,ijl->kl", d, a), d.permute(2, 1, 0)

    compared(alone, chain(lambda x: x), mesh((2,)))


def contracted():
    from opt_einsum import contract

    def run(a, b):
        return contract("ijk,kl,ijm->lm", a, b, a), contract("ijk,kl->lij", a, b)

    compared(run, run, mesh((2,)))


def test_functions_are_found_by_the_module_of_the_class(two_ranks):
    two_ranks.run(found_by_the_module_of_the_class)


@pytest.mark.skipif(find_spec("opt_einsum") is None, reason="needs opt_einsum")
def test_contractions_of_opt_einsum(two_ranks):
    two_ranks.run(contracted)


def test_no_program_is_offered_them():
    assert {"einsum", "tensordot", "transpose"}.isdisjoint(sw.__all__)
