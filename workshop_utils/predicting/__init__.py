"""Behind `classify`: a model that predicts, in full precision or in eight bits, and a GPU's decoder."""
