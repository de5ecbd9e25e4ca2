"""Each script in this folder is a benchmark that answers one question. All benchmarks write records
to bench/results/, from which all tables and plots are generated. Read first: common.py.
"""
