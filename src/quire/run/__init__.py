"""L4: one step: arrays of a plan, the forward pass, its recordings, sampling; the memory they need."""
