"""L4: what a model needs and how fast it is, before it is loaded: memory, step times, costs. Engines allocate by it."""
