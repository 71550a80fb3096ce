"""From a request's prompts to pieces of text: what the answers of every API are made of."""
