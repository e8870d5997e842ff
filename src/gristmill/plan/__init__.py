"""Floor 2: what a model costs, before anything is spent; needs no torch."""
