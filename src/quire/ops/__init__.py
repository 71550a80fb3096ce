"""L1: the operations of a step. The torch reference of each is its definition; backends register faster ones."""
