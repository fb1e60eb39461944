"""A whole step as values: its calls and tensors, the problem of choosing for all of them at once, and its solvers.

The solvers know whole numbers only: no operator, no mesh, no torch. Nothing here runs a program or sends anything.
"""
