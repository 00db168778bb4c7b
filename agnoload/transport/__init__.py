"""How batches travel between processes: the arena they lie in, and the codec that lays them there."""
