"""Callbacks for schedules (warmup, annealing, seeds) and for what a run keeps (statistics, FLOPs, record, figure)."""
