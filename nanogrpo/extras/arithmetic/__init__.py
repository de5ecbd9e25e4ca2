"""The built-in task `arithmetic`, and a base model that can still improve on this task. Start with
task.py."""
