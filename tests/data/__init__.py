"""Tests of nanogrpo/data/."""
