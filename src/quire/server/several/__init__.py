"""Several models behind one server: who is loaded, and which of them a request is for."""
