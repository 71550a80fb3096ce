"""The compression workbench: models made smaller, and what that cost."""
