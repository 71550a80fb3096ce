"""L3: from a checkpoint on disk to a decoder."""
