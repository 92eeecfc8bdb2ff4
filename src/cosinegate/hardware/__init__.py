"""Processes, memory, and what is mended of libraries."""
