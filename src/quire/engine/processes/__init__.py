"""Processes of engines: how they start, are watched, die and are replaced; replicas."""
