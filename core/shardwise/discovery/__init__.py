"""Plugins: found through entry points, loaded, and kept in the one registry of this process."""
