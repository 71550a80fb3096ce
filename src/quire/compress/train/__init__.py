"""Training of whole models: adapters, fake quantization, recovery of what was pruned, students of a teacher."""
