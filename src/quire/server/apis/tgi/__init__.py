"""The API of text-generation-inference."""
