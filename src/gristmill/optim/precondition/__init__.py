"""Preconditioners: curvature, estimated from second moments, that gradients are divided by."""
