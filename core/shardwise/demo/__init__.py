"""The demo: a byte-level GPT that trains on a mesh of processes and is held against one device."""
