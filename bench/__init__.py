"""One script a question; raw rows in bench/results/, everything else is made from them. Read first:
common.py.
"""
