"""From claimed tensors to packed layers."""
