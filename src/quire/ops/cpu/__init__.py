"""The CPU backend: numpy arrays and packed matrices handed to the native unit of this processor."""
