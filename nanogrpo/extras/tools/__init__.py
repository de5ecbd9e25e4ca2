"""Tools, environments and rollout functions. Start with turns.py."""
