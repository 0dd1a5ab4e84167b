"""Search for the best program of a checkpoint under a budget."""
