"""Behind `classify`: the model, the engine that computes it, and a GPU's decoder."""
