"""From a config to a run that starts, goes on, or is loaded."""
