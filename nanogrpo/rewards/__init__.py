"""Reward functions: the built-in ones, how they are called, and the process they run in. Start with
builtin.py.
"""
