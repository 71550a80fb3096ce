"""The API of llama.cpp's server."""
