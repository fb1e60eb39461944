"""Plugins: read their entry points, load them, and keep their rules in the one registry of this process."""
