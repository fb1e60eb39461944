"""Tools: questions about programs and rules that a run does not ask."""
