"""Data sources other than JSON lines."""
