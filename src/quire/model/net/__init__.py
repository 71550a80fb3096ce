"""The network that runs: a decoder put together from parts."""
