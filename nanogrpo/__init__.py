"""nanogrpo: GRPO for language models, whole, in plain PyTorch and Triton. Start reading at
train.py.
"""

__version__ = "0.1.0"
