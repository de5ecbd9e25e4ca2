"""Sampling engines: their common interface (base.py), and the embedded engine (local.py). Start
with
base.py.
"""
