"""Prompts: where they come from, and which ones each step draws. Start with prompts.py."""
