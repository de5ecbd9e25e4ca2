"""The model: decoder, attention, output head, and the Hugging Face files it is read from and
written to. Start with decoder.py.
"""
