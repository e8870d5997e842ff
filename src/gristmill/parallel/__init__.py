"""Floor 6: devices, precision and the strategies that run a step."""
