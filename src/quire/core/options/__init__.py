"""Options: fields of structs that flags, TOML files, checks and documents are all made from."""
