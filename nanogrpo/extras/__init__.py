"""Features that are off by default, each in its own file or folder. attach.py lists them all."""
