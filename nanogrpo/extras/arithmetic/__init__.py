"""The built-in task, and a base model that can still improve on it. Start with task.py."""
