"""Tests of nanogrpo/vllm/."""
