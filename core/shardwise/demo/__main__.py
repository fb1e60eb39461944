"""``python -m shardwise.demo``, and what torchrun runs."""

from shardwise.demo.command import demo

if __name__ == "__main__":
    demo(prog_name="shardwise demo")
