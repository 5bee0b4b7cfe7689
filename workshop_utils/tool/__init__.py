"""Behind the command `workshop`: what it can do, one module each."""

FIRST = "notebooks/01-getting-started.ipynb"  # by which the folder of the workshop is known
