"""`python -m benchmarks.detection`: the detection table."""

from benchmarks.detection.table import main

if __name__ == "__main__":
    main()
