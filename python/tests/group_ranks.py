"""Ranks of a process group without torch: processes that exchange messages through a folder.

`Ranks(4, code)` runs `code` in four processes, with `rank`, `size`, `group(timeout)`, `folder` and `say(answer)`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from package import ROOT

PREAMBLE = """
import sys, time, os, json
sys.path[:0] = json.loads(sys.argv[4])
import numpy as np
import tensorfs
import group_ranks
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
opened = 0

def group(timeout=20, wire=True):
    global opened
    opened += 1
    return group_ranks.group(folder, rank, size, opened, timeout, wire)

def say(answer):
    print(json.dumps(answer), flush=True)

def failure(work):
    try:
        work()
    except Exception as e:
        return [type(e).__name__, str(e)]
    return None
"""


class FolderMailbox:
    """A mailbox in which each key is a file."""

    def __init__(self, folder):
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)

    def _path(self, key):
        return self._folder / key.replace("/", "-")

    def _written(self, value):
        descriptor, path = tempfile.mkstemp(dir=self._folder)
        with open(descriptor, "wb") as file:
            file.write(value)
        return path

    def set(self, key, value):
        os.rename(self._written(value), self._path(key))

    def get(self, key):
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def claim(self, key, value):
        mine = self._written(value.encode())
        try:
            os.link(mine, self._path(key))
        except FileExistsError:
            pass
        os.unlink(mine)
        return self._path(key).read_text()

    def delete(self, key):
        self._path(key).unlink(missing_ok=True)



class FolderWire:
    """Collectives by files."""

    def __init__(self, folder, rank, size):
        self._mailbox, self._rank, self._size, self._number = FolderMailbox(folder), rank, size, 0

    def drop(self, failed):
        pass

    def buffer(self, nbytes):
        made = np.empty(nbytes, np.uint8)
        return made, made.ctypes.data

    def _begin(self, of, sizes, to):
        self._number += 1
        start = 0
        for other, length in enumerate(sizes):
            self._mailbox.set(f"{self._number}-{self._rank}-{other}", of[start : start + length].tobytes())
            start += length
        number, left = self._number, list(to)

        def is_done():
            while left:
                found = self._mailbox.get(f"{number}-{left[0][0]}-{self._rank}")
                if found is None:
                    return False
                left.pop(0)[1][:] = np.frombuffer(found, np.uint8)
            return True

        return is_done

    def _same_for_all(self, of, into):
        self._number += 1
        number, me = self._number, self._rank
        if of is not None:
            self._mailbox.set(f"{number}-{me}", of.tobytes())
        left = list(into)

        def is_done():
            while left:
                found = self._mailbox.get(f"{number}-{left[0][0]}")
                if found is None:
                    return False
                left.pop(0)[1][:] = np.frombuffer(found, np.uint8)
            return True

        return is_done

    def all_gather(self, into, of):
        return self._same_for_all(of, [(rank, into[rank * len(of) : (rank + 1) * len(of)]) for rank in range(self._size)])

    def broadcast(self, of, root):
        return self._same_for_all(of if root == self._rank else None, [(root, of)])

    def scatter(self, into, of, sizes_in, sizes_out):
        ends = np.cumsum([0, *sizes_in])
        return self._begin(of, sizes_out, [(rank, into[ends[rank] : ends[rank + 1]]) for rank in range(self._size)])


def group(folder, rank, size, number, timeout, wire):
    from tensorfs._group import Group

    def make(word):
        return FolderWire(f"{folder}/wire{number}-{word}", rank, size)

    mailbox = FolderMailbox(f"{folder}/mail{number}")
    return Group(rank, size, mailbox, mailbox, make if wire else None, timeout)


class Ranks:
    """Processes that run `code`. `answers` returns their answers."""

    def __init__(self, size, code, folder):
        paths = json.dumps([p for p in sys.path if p])
        self.all = [
            subprocess.Popen(
                [sys.executable, "-c", PREAMBLE + code, str(rank), str(size), str(folder), paths],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for rank in range(size)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.all:
            if one.poll() is None:
                one.kill()
            one.wait()
            one.stdout.close()
            one.stderr.close()

    def line(self, rank):
        return json.loads(self.all[rank].stdout.readline())

    def answers(self, ranks=None, seconds=60):
        """The last line of each rank."""
        found, until = [], time.monotonic() + seconds
        for rank in range(len(self.all)) if ranks is None else ranks:
            out, err = self.all[rank].communicate(timeout=max(until - time.monotonic(), 0.1))
            if self.all[rank].returncode:
                raise AssertionError(f"rank {rank} ended with {self.all[rank].returncode}: {err}")
            found.append(json.loads(out.splitlines()[-1]))
        return found
