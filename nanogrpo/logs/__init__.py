"""What a run reports: metrics, the console and metrics.jsonl, completions, dashboards, traces,
plots. Start with metrics.py.
"""
