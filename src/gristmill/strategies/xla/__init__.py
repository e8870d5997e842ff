"""Training on XLA devices: a step of torch lowered to JAX."""
