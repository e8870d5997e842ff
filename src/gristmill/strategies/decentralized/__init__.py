"""Decentralized training: workers with weights of their own, which they exchange with others."""
