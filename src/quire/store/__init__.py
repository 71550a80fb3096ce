"""Models by name: a catalog of those that people use, downloads that go on where they were cut off, and the folder in
which pulled models lie."""
