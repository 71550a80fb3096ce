"""L2: logits rows to tokens."""
