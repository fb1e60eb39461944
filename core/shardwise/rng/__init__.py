"""Random numbers that depend on the place in the global tensor, and not on the mesh."""
