"""Random numbers by their place in the global tensor, so that they do not depend on the mesh."""
