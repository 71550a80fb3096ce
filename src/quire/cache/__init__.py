"""L1: blocks of the paged KV cache, who owns them, and which prefixes they hold."""
