"""Rows from files that other tools wrote: one module a tool, and what their figures mean said metric by metric."""
