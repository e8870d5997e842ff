"""Floor 10: the loop, and the place where everything meets."""
