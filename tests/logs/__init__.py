"""Tests of nanogrpo/logs/."""
