"""L5: the OpenAI-compatible HTTP server."""
