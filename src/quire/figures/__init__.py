"""L1: figures. One schema for every number that was measured, predicted, simulated or imported, and its files."""
