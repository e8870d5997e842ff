"""The server: an OpenAI-compatible API and pages to use it."""
