"""Floor 9: how good a model is."""
