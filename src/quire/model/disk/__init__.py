"""The way from a folder or a file to claimed tensors: what lies on disk, and which part of the model each tensor is."""
