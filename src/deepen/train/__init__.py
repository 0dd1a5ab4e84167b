"""Training: the one loop of the product, and the healing of checkpoints that starts it."""
