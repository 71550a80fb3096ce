"""L0: the nouns every other layer speaks in. Nothing here imports torch or another layer."""
