"""LoRA adapters: steps whose adapters hold more than low-rank matrices, and adapters that come and go."""
