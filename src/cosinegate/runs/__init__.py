"""A run's files: its record, checkpoints, locks; written whole, read with care."""
