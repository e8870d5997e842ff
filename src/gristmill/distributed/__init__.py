"""The processes of a run: devices, process groups, control messages and failure detection."""
