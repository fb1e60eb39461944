"""``python -m shardwise``: the command ``shardwise`` of this Python."""

from shardwise.cli import main

main(prog_name="shardwise")
