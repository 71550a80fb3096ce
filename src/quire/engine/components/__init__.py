"""What the loop of an engine is made of."""
