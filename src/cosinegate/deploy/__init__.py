"""Compiles, exports and times a trained network."""
