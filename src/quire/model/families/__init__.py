"""What differs between families, as rows of one table."""
