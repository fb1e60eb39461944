"""Embedding: tables sharded by column or by row, indices sharded any way."""
