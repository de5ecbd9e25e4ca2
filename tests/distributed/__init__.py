"""Tests of nanogrpo/distributed/."""
