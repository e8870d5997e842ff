"""Floor 3: one self-contained HTML page made from run folders."""
