"""Behind `train`: a run's batches, its checkpoint, and the signal that ends it."""
