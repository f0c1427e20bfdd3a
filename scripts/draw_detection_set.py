"""Draw a detection set in COCO's layout: FOLDER/{train,val}/ and FOLDER/annotations/.

python scripts/draw_detection_set.py FOLDER [--train 5000] [--val 1000]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.detection.draw import FORMATS, DrawConfig, draw_detection_set


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=5000, help="training images")
    parser.add_argument("--val", type=int, default=1000, help="validation images")
    parser.add_argument("--size", type=int, default=128, help="side of an image in pixels")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-objects", type=int, default=6)
    parser.add_argument("--format", choices=sorted(FORMATS), default="png")
    options = parser.parse_args()
    for split in ("train", "val"):
        count = getattr(options, split)
        if count == 0:
            continue
        config = DrawConfig(count, options.size, options.seed, options.max_objects, options.format)
        started = time.perf_counter()
        written = draw_detection_set(options.folder, config, split)
        print(f"{written}: {count} images in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
