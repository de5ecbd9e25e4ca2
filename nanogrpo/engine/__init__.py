"""Sampling engines: the protocol (base.py), the embedded one (local.py), and engines that wrap an
engine. Start with base.py.
"""
