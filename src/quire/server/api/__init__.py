"""The routes: what bodies say, what replies are, one file for each API."""
