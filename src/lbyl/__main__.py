"""`python -m lbyl` is the program `lbyl`."""

from lbyl.app.cli import main

if __name__ == "__main__":
    main()
