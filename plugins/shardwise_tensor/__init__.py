"""Rules for copying, filling, slicing, joining and indexing tensors."""
