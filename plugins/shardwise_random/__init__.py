"""Rules for ops that draw random numbers: dropout, in-place draws, and random tensors like another."""
