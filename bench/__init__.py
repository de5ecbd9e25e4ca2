"""Benchmarks: each script answers one question. Their records are in bench/results/, and all tables
and plots are generated from these records. Read first: common.py.
"""
