"""Kill thousands of processes that use one prefix store, at random moments, and look whether anything broke.

The same children and checks as ``tests/storage/test_prefix_crash.py``, for as long as one likes; run from a checkout.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.storage.prefixes import check_sound, open_descriptors, prefixes
from tests.storage.test_prefix_crash import CAPACITY, kill_many

ROUND_KILLS = 100


def soak(folder: Path, kills: int, together: int, seed: int) -> dict[str, Any]:
    """Kill ``kills`` children, ``together`` running at a time, on a store in ``folder``; any fault raises.

    Returns:
        What was done and what is left: kills, seconds, blocks, bytes on the disk, descriptors and peak memory of this
        process, which had the store open between the kills.
    """
    began = time.monotonic()
    descriptors = set()
    for number in range(0, kills, ROUND_KILLS):
        kill_many(folder, min(ROUND_KILLS, kills - number), seed + number, together=together)
        descriptors.add(open_descriptors())
        done = min(kills, number + ROUND_KILLS)
        print(f"{done} kills, {time.monotonic() - began:.0f} s", flush=True)
    with prefixes(folder, CAPACITY) as store:
        checked = check_sound(store)
        stats = store.stats()
    return {
        "kills": kills,
        "together": together,
        "seed": seed,
        "seconds": round(time.monotonic() - began),
        "records_checked": checked,
        "allocated_bytes": stats.allocated_bytes,
        "capacity_bytes": stats.capacity_bytes,
        "descriptors": sorted(descriptors),
        "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=5000)
    parser.add_argument("--together", type=int, default=3, help="children at a time")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--folder", type=Path, default=None, help="default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tierkv-soak-") as temporary:
        folder = arguments.folder or Path(temporary)
        print(json.dumps(soak(folder, arguments.kills, arguments.together, arguments.seed), indent=2))


if __name__ == "__main__":
    main()
