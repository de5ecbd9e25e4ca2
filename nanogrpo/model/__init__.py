"""The model (decoder, attention and output head), and how its Hugging Face files are read and
written. Start with decoder.py.
"""
