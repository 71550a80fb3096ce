"""What was said in sound: windows of it, tokens that ask for a text, rules of trying again, segments with times."""
