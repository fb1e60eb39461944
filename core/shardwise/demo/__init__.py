"""The demo: a byte-level GPT that trains on a mesh of processes and is compared with one device."""
