"""Fourier transforms along whole dims."""
