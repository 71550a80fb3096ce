"""Images of prompts: when they are encoded, their features in a step, and how they come to an engine."""
