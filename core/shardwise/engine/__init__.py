"""The engine: from a call to its plan, and what becomes of an op without a rule."""
