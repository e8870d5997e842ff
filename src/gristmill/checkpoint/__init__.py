"""Floor 7: what survives a crash."""
