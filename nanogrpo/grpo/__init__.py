"""The algorithm, as pure functions: advantages, the loss and its menu of objectives, packing,
entropy. Start with loss.py.
"""
