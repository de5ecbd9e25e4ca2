"""Tests of nanogrpo/vision/."""
