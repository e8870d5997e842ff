"""What runs a step: how model, optimizer and batch are divided over processes."""
