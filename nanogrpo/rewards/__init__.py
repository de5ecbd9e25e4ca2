"""The built-in reward functions, how reward functions are called, and the process that runs the
user's functions.

Start with builtin.py.
"""
