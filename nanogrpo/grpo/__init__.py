"""The GRPO algorithm as pure functions: advantages, loss, objectives, packing and entropy. Start
with loss.py.
"""
