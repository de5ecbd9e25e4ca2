"""Reward functions: the built-in ones, how they are called, and the process that runs the user's.

Start with builtin.py.
"""
