"""Kernels in Triton, each with a plain version elsewhere that computes the same."""
