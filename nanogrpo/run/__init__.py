"""The parts of one run: its setup, output folder, checkpoints, memory estimate and optimizer. Start
with setup.py.
"""
