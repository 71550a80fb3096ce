"""The APIs that clients may speak, a folder for each."""
