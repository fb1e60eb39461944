"""Torch API that is not public, a shelf per subject. Each use says why the public way does not do."""
