"""Convolution, pooling, interpolation and the rearrangements that go with pictures."""
