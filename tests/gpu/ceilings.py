"""Measures the limits of this machine: copies from pinned memory to the GPU, copies in memory, reads of the disk, and
the cost of pinning."""

import argparse
import ctypes
import mmap
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch

GIB = 1 << 30


def median_rate(length, runs, work):
    """The rate of `work` in GB/s. `work` moves `length` bytes, and returns when all of them have arrived."""
    work()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return length / statistics.median(times) / 1e9


def to_device(pinned, piece, n_streams):
    target = torch.empty_like(pinned, device="cuda:0")
    streams = [torch.cuda.Stream() for _ in range(n_streams)]

    def work():
        for number, start in enumerate(range(0, len(pinned), piece)):
            with torch.cuda.stream(streams[number % n_streams]):
                target[start : start + piece].copy_(pinned[start : start + piece], non_blocking=True)
        torch.cuda.synchronize()

    return work


def read_by_threads(path, length, n_threads, buffer):
    """Reads a file into existing memory. Each thread reads a part of it."""
    part = length // n_threads
    view = memoryview(buffer)

    def read(number):
        file = os.open(path, os.O_RDONLY)
        start = number * part
        for at in range(start, start + part, 8 << 20):
            os.preadv(file, [view[at : min(at + (8 << 20), start + part)]], at)
        os.close(file)

    def work():
        threads = [threading.Thread(target=read, args=(number,)) for number in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return work


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--runs", type=int, default=10)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name(0)}, {os.cpu_count()} cores, torch {torch.__version__}")

    start = time.perf_counter()
    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    print(f"pin 1 GiB by cudaHostAlloc: {time.perf_counter() - start:.3f} s")
    pinned.random_(0, 256)
    for piece in (1, 4, 8, 16):
        for n_streams in (1, 2):
            rate = median_rate(GIB, options.runs, to_device(pinned, piece << 20, n_streams))
            print(f"pinned to device, pieces of {piece} MiB, {n_streams} streams: {rate:.1f} GB/s")

    area = mmap.mmap(-1, GIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    area.madvise(mmap.MADV_HUGEPAGE)
    area[::4096] = bytes(GIB // 4096)
    start = time.perf_counter()
    failed = torch.cuda.cudart().cudaHostRegister(address, GIB, 0)
    print(f"register 1 GiB that was touched: {time.perf_counter() - start:.3f} s (error {int(failed)})")
    start = time.perf_counter()
    torch.empty(4 * GIB, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    print(f"allocate 4 GiB on the device: {time.perf_counter() - start:.3f} s")

    path = Path(options.dir, "tensorfs-ceiling")
    try:
        path.write_bytes(os.urandom(GIB >> 4) * 16)
        for n_threads in (1, 2, 4, 8, 12, 16):
            rate = median_rate(GIB, options.runs, read_by_threads(path, GIB, n_threads, area))
            print(f"page cache to memory, {n_threads} threads: {rate:.1f} GB/s")
    finally:
        path.unlink(missing_ok=True)
    if not int(failed):
        torch.cuda.cudart().cudaHostUnregister(address)


if __name__ == "__main__":
    main()
