"""The algorithm as pure functions: advantages, loss, objectives, packing, entropy. Start with
loss.py.
"""
