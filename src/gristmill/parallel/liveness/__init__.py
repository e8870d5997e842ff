"""No silent hang: every process of a run sends heartbeats and notices when a peer stops."""
