"""Each script in this folder is a benchmark that answers one question. The records of all
benchmarks are in bench/results/, and all tables and plots are generated from these records. Read
first: common.py.
"""
