"""Checkpoints of other programs, read without running code from them."""
