"""Torch API that is not public, one module per subject. Each use says why the public API is not enough."""
