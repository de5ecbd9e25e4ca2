"""The built-in task, and a base model that has something to learn on it. Start with task.py."""
