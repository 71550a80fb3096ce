"""Which weights, heads, channels and layers a model can do without, and the model without them."""
