"""The way from claimed tensors to packed layers."""
