"""The model: decoder, attention and output head, and the reading and writing of their Hugging Face
files. Start with decoder.py.
"""
