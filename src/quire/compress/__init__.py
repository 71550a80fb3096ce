"""The compression workbench: checkpoints made smaller, and written as other programs read them."""
