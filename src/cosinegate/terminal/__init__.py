"""The terminal: printed lines, tables, signals, streams, secrets."""
