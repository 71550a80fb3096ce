"""A checkpoint as a differentiable model, as named tensors and weight matrices, and as a folder that is written."""
