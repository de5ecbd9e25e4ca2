"""The ranks of a run: how they communicate (world.py), shard the model (fsdp.py) and fail
together (failure.py).
"""
