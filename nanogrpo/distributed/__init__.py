"""How the ranks of a run communicate (world.py), shard the model (fsdp.py) and end together
(failure.py).
"""
