"""Benches: one script per question. Their records are in bench/results/; all tables and plots are
made from them. Read first: common.py.
"""
