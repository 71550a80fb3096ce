"""The progress of a compression run: on disk, so that it resumes, and on the terminal."""
