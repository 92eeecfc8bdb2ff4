"""The person at the terminal: commands, messages, signals."""
