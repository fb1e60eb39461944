"""Views: the same elements under other dims."""
