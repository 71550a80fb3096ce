"""Between an event loop and an engine: streams, admission, metrics."""
