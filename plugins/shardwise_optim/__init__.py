"""Rules for the ops of optimizers: foreach and fused ops over lists of tensors, and loss scaling."""
