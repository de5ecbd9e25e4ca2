"""Exercises to the course: docs/exercises.md says how to start."""
