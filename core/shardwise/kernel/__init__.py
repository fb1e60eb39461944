"""The kernel: specs, schemas, rules as values, the registry, the dispatcher. It knows no costs and sends nothing."""
