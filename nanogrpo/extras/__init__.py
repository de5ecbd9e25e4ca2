"""Everything that is off by default, one file or folder each. attach.py lists them all."""
