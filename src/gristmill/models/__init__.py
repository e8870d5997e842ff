"""Floor 5: the networks and what the rest may ask of them."""
