"""The model: decoder, attention, output head and adapters, and the reading and writing of their
Hugging Face files. Start with decoder.py.
"""
