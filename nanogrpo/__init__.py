"""nanogrpo: GRPO for language models in plain PyTorch and Triton. Start reading at train.py."""

__version__ = "0.2.0"
