"""The records of a run: metrics, console, completions, dashboards, traces and plots.

Start with metrics.py.
"""
