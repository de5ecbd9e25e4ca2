"""Tests of nanogrpo/grpo/."""
