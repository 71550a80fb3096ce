"""L4: the engine loop, the process it runs in, and the clients that talk to it."""
