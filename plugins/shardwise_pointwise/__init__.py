"""Rules for elementwise ops: every unary, binary and ternary one, forward and backward, as one table."""
