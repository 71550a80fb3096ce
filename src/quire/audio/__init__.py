"""Audio: files decoded within limits, brought to one rate, and made into what speech models read."""
