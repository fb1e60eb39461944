"""Linear algebra: factorizations, solvers, determinants, inverses, and distances between rows."""
