"""Stores of KV blocks: sequences that wait for them, the bytes of blocks, what an engine keeps and when."""
