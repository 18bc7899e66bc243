"""Better buckets for what the first backwards show, and the move to them. Optional: nothing else needs it."""
