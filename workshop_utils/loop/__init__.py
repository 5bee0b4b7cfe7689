"""Behind `train`: which images a rank takes at which step, and how a run is saved, interrupted and resumed."""
