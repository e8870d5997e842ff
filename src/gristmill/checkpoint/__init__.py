"""Floor 7: saving and loading checkpoints."""
