"""Sharding rules for the operators of torchvision: boxes, pooling of regions, deformable convolution.

The entry point registers them by name, so a program that does not use torchvision does not import it.
"""
