"""A server with OpenAI's interface."""
