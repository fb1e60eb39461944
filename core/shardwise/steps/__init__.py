"""Plan whole steps: record a program, decide for all of its calls together, and run it by the decisions."""
