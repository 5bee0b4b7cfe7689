"""What a script imports from its own folder."""

LEARNING_RATE = 0.1
