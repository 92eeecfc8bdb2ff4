"""Processes, memory, and repairs of libraries."""
