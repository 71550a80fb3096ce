"""L1: who advances by how many tokens in the next step."""
