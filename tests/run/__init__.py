"""Tests of nanogrpo/run/."""
