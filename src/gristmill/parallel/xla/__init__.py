"""Training on XLA devices: TPUs, and CUDA or the CPU through XLA, by way of JAX."""
