"""Tests of nanogrpo/extras/vision/."""
