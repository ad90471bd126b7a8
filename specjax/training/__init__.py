"""How drafters learn: distances, the loop, its checkpoints, and what the weights are worth in decoding."""
