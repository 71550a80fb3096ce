"""What each feature plans, behind one protocol."""
