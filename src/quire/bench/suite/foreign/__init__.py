"""Scripts that the interpreters of peers run, in environments without quire: they import each other alone."""
