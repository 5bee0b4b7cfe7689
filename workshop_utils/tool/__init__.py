"""Behind the command `workshop`: what it can do, one module each."""
