"""An environment with plugins of every fate."""

import pytest


@pytest.fixture(scope="module")
def zoo(tmp_path_factory, shardwise_wheel, installed):
    """An environment with one plugin of each fate, all with or around a rule for ``aten._copy_from_and_resize``."""
    folder = tmp_path_factory.mktemp("zoo")
    raising = installed.source_of("_values_copy", "R -> R") + "\n        raise OSError('no libacme.so')\n"
    wheels = [
        installed.make_wheel(folder, "acme-kernels"),
        installed.make_wheel(folder, "acme-broken", raising),
        installed.make_wheel(folder, "acme-old", "raise OSError('imported')", group="shardwise.plugins.v0"),
        installed.make_wheel(folder, "acme-coming", "raise OSError('imported')", group="shardwise.plugins.v2"),
    ]
    # Its requirement does not hold, so pip itself would refuse it; --no-deps is how people get into such a state.
    refused = installed.make_wheel(folder, "acme-new", "raise OSError('imported')", requires=("shardwise>=99",))
    return installed.Environment(folder / "env").install("--no-deps", shardwise_wheel, *wheels, refused)
