"""Dogs to classify: the 120 breeds, sketches of them drawn by code, and the photos of Stanford Dogs."""
