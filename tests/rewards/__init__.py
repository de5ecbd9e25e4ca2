"""Tests of nanogrpo/rewards/."""
