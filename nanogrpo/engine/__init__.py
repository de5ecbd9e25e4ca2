"""Sampling engines: the protocol (base.py), and the embedded engine (local.py). Start with
base.py.
"""
