"""The command line. Nothing heavy is imported before a command runs, so that help is quick."""

from lbyl.cli.app import app, main

__all__ = ["app", "main"]
