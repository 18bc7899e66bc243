"""Trial steps of copies of the user's optimizer: whether, and in which pieces, it may be sharded."""
