"""The model: decoder, attention, output head and adapters, and the Hugging Face files they are read
from and written to. Start with decoder.py.
"""
