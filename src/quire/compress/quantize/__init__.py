"""The arithmetic of quantization: matrices in, `quire.ops.weights.Weight` out; no files and no models."""
