"""Training runs: assembling, resuming, the training loop and its hooks."""
