"""Where text comes from, and how it becomes documents."""
