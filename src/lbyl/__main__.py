"""`python -m lbyl` is the program `lbyl`."""

from lbyl.cli import main

if __name__ == "__main__":
    main()
