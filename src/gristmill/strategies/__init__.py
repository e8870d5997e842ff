"""Training strategies: how model, optimizer and batch are divided over processes."""
