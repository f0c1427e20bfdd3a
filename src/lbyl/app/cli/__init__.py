"""The command line: a module for every command, imported when that command runs."""

from lbyl.app.cli.app import main

__all__ = ["main"]
