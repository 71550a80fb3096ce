"""How matrices lie in files: one file for each layout that other programs read."""
