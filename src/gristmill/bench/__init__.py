"""Floor 11: how long a training step takes, and where its time goes."""
