"""The test suite. Its folders follow the package's: tests/model tests nanogrpo/model."""
