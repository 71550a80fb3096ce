"""GGUF files: header, metadata, tensor infos and vocabulary, over a memory map. No tensor library here."""
