"""Every key of a config, checked before any work."""
