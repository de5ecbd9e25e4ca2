"""Benchmarks, with one script per question. Their records are in bench/results/; all tables and
plots are generated from them. Read first: common.py.
"""
