"""Heartbeats of the processes of a run, and the verdict on who is to blame when one is lost."""
