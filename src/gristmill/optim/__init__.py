"""Floor 5: optimizers and schedules."""
