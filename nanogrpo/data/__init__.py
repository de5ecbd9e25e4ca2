"""Prompts: where they come from, and which of them a step draws. Start with prompts.py."""
