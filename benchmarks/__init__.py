"""Benchmarks of lbyl: one file per table, run from the repository root.

`python -m benchmarks.restoration`, and likewise for the others; `--help` tells the settings.
"""
