"""The processes of a run: devices, process groups, messages between them, and who is alive."""
