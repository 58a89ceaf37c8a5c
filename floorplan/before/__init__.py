"""Module names that a step.py written by 0.1 holds: this folder is on the package's path, for one release."""
