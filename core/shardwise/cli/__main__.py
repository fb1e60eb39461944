"""``python -m shardwise.cli``, and what torchrun runs."""

from shardwise.cli.main import main

if __name__ == "__main__":
    main(prog_name="shardwise")
