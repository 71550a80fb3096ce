"""The definitions of the ops, in torch: slow on purpose, correct by reading. Importing a module registers its ops."""
