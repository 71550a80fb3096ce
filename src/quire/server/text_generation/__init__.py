"""Text generation: from a request's prompts to the pieces of text that every API's answers are made of."""
