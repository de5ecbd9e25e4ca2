"""One run: its parts (setup.py), its folder, its checkpoints, the memory it needs, the optimizer.
Start with setup.py.
"""
