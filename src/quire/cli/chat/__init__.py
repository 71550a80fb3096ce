"""`quire chat` and `quire run`: a conversation with a model in this process or with one that a server has."""
