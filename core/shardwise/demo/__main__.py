"""``python -m shardwise.demo``, and what torchrun runs: the command ``shardwise demo``."""

import sys

from shardwise.cli.main import main

if __name__ == "__main__":
    main(["demo", *sys.argv[1:]], prog_name="shardwise")
