"""Reductions: sums, means, extremes, moments, norms, and ops along one dim such as sort and cumsum."""
