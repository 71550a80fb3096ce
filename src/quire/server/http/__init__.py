"""HTTP itself: connections, streams, what is refused, and who is told of an exchange."""
