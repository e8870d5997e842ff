"""Heartbeats of the processes of a run, and the verdict on which rank failed when one is lost."""
