"""JSON schemas as people's tools write them -> schemas that a grammar holds."""
