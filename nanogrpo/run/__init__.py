"""The parts of one run (setup.py), its output folder, checkpoints, memory estimate and optimizer.
Start with setup.py.
"""
