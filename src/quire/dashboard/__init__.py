"""L5: rows of figures as one page that needs nothing else."""
