"""Behind `photos`: how photos are read and decoded."""
