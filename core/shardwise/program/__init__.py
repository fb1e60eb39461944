"""Planning a whole step: solvers that choose a state for every variable at the least sum of costs.

They know whole numbers only: no operator, no mesh, no torch.
"""
