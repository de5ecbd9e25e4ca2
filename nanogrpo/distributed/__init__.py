"""Several processes: what they exchange (world.py), how they share the model (fsdp.py), how they
fail (failure.py).
"""
