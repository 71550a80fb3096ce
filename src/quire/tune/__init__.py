"""L5: the best options for a target on this machine, by measured search that the model of `plan` prunes."""
