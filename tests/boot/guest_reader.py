"""Runs in the guest. It keeps a mapping and a descriptor of one file open, and compares their bytes with the expected
file.

guest_reader.py FILE EXPECTED STATE once|PAUSE: runs one round, or endless rounds with PAUSE seconds between them. After
every round it writes its progress to STATE as JSON. At the first wrong byte or failed read it ends with status 1. A
failed read of the mapping ends it by SIGBUS.
"""

import json
import mmap
import os
import sys
import time

STEP = 1 << 20


def main():
    path, expected_path, state_path, pause = sys.argv[1:]
    with open(expected_path, "rb") as file:
        expected = file.read()
    file = os.open(path, os.O_RDONLY)
    state = {"pid": os.getpid(), "rounds": 0, "bytes": 0, "longest_ms": 0.0}
    length = os.fstat(file).st_size
    if length != len(expected):
        sys.exit(f"{path}: {length} bytes, {len(expected)} expected")
    mapped = mmap.mmap(file, length, prot=mmap.PROT_READ)
    while True:
        for start in range(0, length, STEP):
            end = min(start + STEP, length)
            begin = time.monotonic()
            same = mapped[start:end] == expected[start:end] and os.pread(file, 4096, start) == expected[start:][:4096]
            state["longest_ms"] = max(state["longest_ms"], (time.monotonic() - begin) * 1e3)
            if not same:
                sys.exit(f"{path}: wrong bytes between {start} and {end}")
            state["bytes"] += end - start
        state["rounds"] += 1
        with open(state_path + ".new", "w") as report:
            json.dump(state, report)
        os.rename(state_path + ".new", state_path)
        if pause == "once":
            return
        # Drops the mapped pages, so that the next round asks the daemon again.
        mapped.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        time.sleep(float(pause))


main()
