"""Tests of nanogrpo/engine/."""
