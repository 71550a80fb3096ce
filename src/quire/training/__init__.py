"""Learning from text: the loop that all training here runs in, and the order in which it reads rows."""
