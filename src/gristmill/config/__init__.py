"""Floor 1: settings, from TOML files and presets into frozen records; needs no torch."""
