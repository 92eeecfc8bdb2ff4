"""The keys of every config, and the checks before any work."""
