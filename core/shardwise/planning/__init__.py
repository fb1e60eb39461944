"""Planning: which legal strategy of a call is cheapest. Arithmetic alone, with the same answer on every rank."""
