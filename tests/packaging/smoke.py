"""What an installed wheel must do; run by hand, by nox and by .ci/run from outside the checkout."""

import subprocess
import sys
from importlib.metadata import distribution, entry_points
from pathlib import Path

import shardwise
from shardwise.discovery.entry_points import GROUP
from shardwise.discovery.process import default_registry

CHECKOUT = Path(__file__).resolve().parents[2]


def main() -> None:
    """Exit with a message at the first thing that is not as it must be."""
    package = Path(shardwise.__file__).resolve()
    check(CHECKOUT not in package.parents, f"shardwise is imported from the checkout: {package}")
    check((package.parent / "py.typed").exists(), "the wheel lacks py.typed")
    check(
        any(str(file).endswith("LICENSE") for file in distribution("shardwise").files or ()), "the wheel lacks LICENSE"
    )
    plugins = {entry.name for entry in entry_points(group=GROUP)}
    registry = default_registry()
    loaded = {origin.plugin for origin in registry.origins}
    check(not registry.failures and loaded == plugins, f"not all plugins load: {plugins - loaded}, {registry.failures}")
    empty = sorted(name for name in plugins if not registry.rules(name))
    check(not empty, f"plugins without a rule: {empty}")
    sizes = ["--steps", "2", "--layers", "1", "--width", "16", "--context", "16", "--mesh", "2x1"]
    subprocess.run([sys.executable, "-m", "shardwise.demo", *sizes], check=True)
    print(f"{len(plugins)} plugins with {len(list(registry.ops()))} ops load from {package.parent}")


def check(truth: bool, message: str) -> None:
    """Exit with the message unless true."""
    if not truth:
        sys.exit(message)


if __name__ == "__main__":
    main()
