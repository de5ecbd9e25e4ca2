"""Sampling engines: the protocol (base.py), the embedded engine (local.py), and wrappers around an
engine (turns.py, ahead.py). Start with base.py.
"""
