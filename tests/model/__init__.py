"""Tests of nanogrpo/model/."""
