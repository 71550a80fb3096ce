"""What each feature adds to an engine, a folder for each: how it is planned, how it runs, and what is at the edge."""
