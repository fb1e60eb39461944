"""Optimizers whose step treats each element alone, whatever their options are.

The others of torch's do not: LBFGS takes dot products over all parameters, Adafactor and Muon see rows and matrices,
SparseAdam works on indices.
"""

from __future__ import annotations

from torch import optim

__all__ = ["ELEMENTWISE"]

ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
