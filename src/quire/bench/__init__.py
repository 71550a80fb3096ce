"""L5: measuring. Latency and throughput of an engine, load on a server, and the quality of a model."""
