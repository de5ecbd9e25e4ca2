"""Read the prompts of a run, and choose the prompts of each step. Start with prompts.py."""
