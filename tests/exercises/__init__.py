"""Tests of exercises/."""
