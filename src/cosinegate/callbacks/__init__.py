"""What moves with time (warmup, annealing, seeds) and what is kept of a run (statistics, FLOPs, record, figure)."""
