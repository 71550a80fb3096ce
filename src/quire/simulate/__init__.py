"""L5: a cluster that pretends: the real scheduler, block pool, prefix cache and router under predicted step times."""
