"""Sampling engines: their common interface (base.py), and the local engine (local.py). Start
with
base.py.
"""
