"""Matrix products, attention and padding."""
