"""Downstream tasks: what a model scores on questions with known answers."""
