"""Generation: an engine that continues sequences of ids, and text around it."""
