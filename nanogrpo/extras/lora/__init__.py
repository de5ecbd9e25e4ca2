"""Low-rank adapters, and frozen weights in four bits. Start with lora.py."""
