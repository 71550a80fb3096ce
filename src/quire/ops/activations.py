"""The activations of MLPs by the names that config.json files give them."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""The position is the number in csrc/units/elementwise.h; `quire.ops.reference.layers` has the functions."""
