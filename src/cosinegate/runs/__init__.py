"""A run's files: record, checkpoints, locks. They are written whole and read as untrusted."""
