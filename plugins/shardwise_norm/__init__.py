"""Normalisation: layer norm, RMS norm, group norm and batch norm with their backwards."""
