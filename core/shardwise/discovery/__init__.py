"""Plugins: found through entry points, loaded, and held in the one registry of this process."""
