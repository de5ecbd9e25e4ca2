"""Tests of work on a GPU: some run on a CPU, the others have the marker gpu."""
