"""Says before anything runs whether a training fits, and how a model is best cut for unequal cards."""
