"""Counts in messages: ``1 placement``, ``2 placements``."""

__all__ = ["counted"]


def counted(number: int, what: str) -> str:
    """``1 rule``, ``2 rules``, ``2 entries``, ``2 meshes``."""
    if number == 1:
        return f"{number} {what}"
    if what.endswith("y") and what[-2:-1] not in "aeiou":
        return f"{number} {what[:-1]}ies"
    return f"{number} {what}{'es' if what.endswith(('sh', 'ch', 's', 'x')) else 's'}"
