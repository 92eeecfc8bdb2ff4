"""Reads run records, and draws and tabulates what they hold."""
