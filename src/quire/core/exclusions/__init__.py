"""Which features exclude each other, and why: one table, from which starts, documents and tests take it."""
