"""Models into and out of files; nothing of a file is run."""
