"""Loads of a process group: every rank gets the right bytes or the same error, no rank hangs, and no files are left.

Each rank is a process without torch. `test_process_group_torch.py` has groups of torch.
"""

import os
import random
import signal
import time
import unittest
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

import tensorfs
from checkpoints import DcpSet, hf_set
from faults import FaultFs
from group_ranks import Ranks
from package import TestCase

# Number of kills. A run by hand can set a greater number.
KILLS = int(os.environ.get("TENSORFS_TEST_KILLS", "0"))

# Compares all operations of a group with the tensors that the genuine package reads.
EVERYTHING = """
source, right = sys.argv[5] if len(sys.argv) > 5 else f"{folder}/all", {}
with np.load(f"{folder}/right.npz") as saved:
    right = dict(saved)

def same(found, expected):
    assert set(found) == set(expected), (set(found), set(expected))
    for name in expected:
        assert found[name].dtype == expected[name].dtype and found[name].shape == expected[name].shape, name
        assert found[name].tobytes() == expected[name].tobytes(), name

def part(whole, dim, rank, size):
    chunk = -(-whole.shape[dim] // size)
    return whole[(slice(None),) * dim + (slice(rank * chunk, (rank + 1) * chunk),)]

names, read = sorted(right), {}
for share in ("host", "network"):
    with tensorfs.safe_open(source, "np", process_group=group(), share=share) as f:
        found = f.get_tensors()
        same(found, right)
        read[share] = f.stats.get("bytes_read", 0)
        found[names[0]][...] = 0
        mine = names[rank::size] + names[:2]
        same(f.get_tensors(mine), {name: right[name] for name in mine})
        same(f.get_tensors([]) if rank else f.get_tensors(), {} if rank else right)
        for dim in range(2):
            fits = {name: dim if whole.ndim > dim else None for name, whole in right.items()}
            expected = {n: right[n] if d is None else part(right[n], d, rank, size) for n, d in fits.items()}
            same(dict(f.tensors(shard=dim)), expected)
            same(dict(f.tensors(shard={n: d for n, d in fits.items() if d is not None})), expected)
            for name in [name for name in names if fits[name] is not None][:4]:
                same({name: f.get_sharded(name, dim)}, {name: expected[name]})
        for to in range(size):
            pushed = f.push_tensor(names[-1], to)
            same({} if pushed is None else {names[-1]: pushed}, {names[-1]: right[names[-1]]} if to == rank else {})
    into = {name: np.empty_like(whole) for name, whole in right.items()}
    tensorfs.load_into(into, source, process_group=group(), share=share)
    same(into, right)
    into = {n: np.empty(w.shape, np.float32 if w.dtype == np.float64 else w.dtype) for n, w in right.items()}
    tensorfs.load_into(into, source, process_group=group(), share=share, cast=True)
    same(into, {name: right[name].astype(into[name].dtype) for name in right})
say({"read": read, "fds": len(os.listdir("/proc/self/fd")), "memfd": "memfd:tensorfs" in open("/proc/self/maps").read()})
"""

def saved(folder, tensors):
    """One file, and its tensors as numpy saves them."""
    Path(folder, "all").mkdir(exist_ok=True)
    save_file(tensors, Path(folder, "all", "model.safetensors"))
    np.savez(Path(folder, "right.npz"), **tensors)


def odd_tensors(seed=1):
    rng = np.random.default_rng(seed)
    shapes = {"a": (300, 70), "b": (1,), "deep": (5, 3, 11, 2), "empty": (0, 9), "few": (2, 2000), "flat": (100_003,)}
    made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    made |= {"scalar": np.array(3.5), "long": rng.standard_normal((3, 200_000)), "bytes": rng.integers(0, 99, (77, 31), np.uint8)}
    return made


class Groups(TestCase):
    def test_every_rank_gets_the_bytes_that_it_asked_for(self):
        for size in (1, 2, 3, 5):
            folder = self.tmp / str(size)
            folder.mkdir()
            saved(folder, odd_tensors())
            with Ranks(size, EVERYTHING, folder) as ranks:
                answers = ranks.answers()
            total = (folder / "all/model.safetensors").stat().st_size
            for share in ("host", "network"):
                read = sum(answer["read"][share] for answer in answers)
                self.assertLess(read, 1.02 * total + size * 4096, (share, size))
            self.assertFalse(any(answer["memfd"] for answer in answers), "shared memory is left")

    def test_sets_and_rank_shards_of_any_kind_are_loaded(self):
        def columns(folder):
            DcpSet(5).cut("up", (1500, 1026), (1, 4)).cut("down", (333, 77), (2, 2), 8).save(folder)

        for make in (hf_set, columns):
            folder = self.tmp / make.__name__
            folder.mkdir()
            make(folder / "all")
            np.savez(folder / "right.npz", **tensorfs.load_file(folder / "all", "np"))
            with Ranks(2, EVERYTHING, folder) as ranks:
                ranks.answers()

    def test_tensors_of_a_host_are_private_though_ranks_share_their_memory(self):
        saved(self.tmp, {"w": np.zeros(3_000_000, np.float32), "v": np.ones(9, np.float32)})
        code = """
with tensorfs.safe_open(f"{folder}/all", "np", process_group=group()) as f:
    found = f.get_tensors()
found["w"][:] = rank + 1
g = group()
with g.operation() as operation:
    operation.exchange(b"written")
say([float(found["w"].min()), float(found["w"].max()), float(found["v"].sum())])
"""
        with Ranks(3, code, self.tmp) as ranks:
            self.assertEqual(ranks.answers(), [[1, 1, 9], [2, 2, 9], [3, 3, 9]])

    def test_a_child_of_a_fork_keeps_the_tensors_and_is_refused_by_the_group(self):
        saved(self.tmp, odd_tensors())
        code = """
f = tensorfs.safe_open(f"{folder}/all", "np", process_group=group())
found, (read, write) = f.get_tensors(), os.pipe()
if os.fork() == 0:
    os.write(write, json.dumps([failure(f.get_tensors), float(found["a"].sum()), f.get_tensor("b").shape]).encode())
    os._exit(0)
os.wait()
answer = json.loads(os.read(read, 9999))
assert abs(answer[1] - float(found["a"].sum())) < 1e-3 and answer[2] == [1]
f.get_tensors()
say(answer[0])
"""
        with Ranks(2, code, self.tmp) as ranks:
            for kind, message in ranks.answers():
                self.assertEqual(kind, "GroupError")
                self.assertIn("belongs to the process that opened it", message)


class Refused(TestCase):
    def all_say(self, code, size=3, seconds=60):
        """The answer of the ranks, which has to be the same on all of them."""
        with Ranks(size, code, self.tmp) as ranks:
            answers = ranks.answers(seconds=seconds)
        self.assertTrue(all(answer == answers[0] for answer in answers), answers)
        return answers[0]

    def test_a_rank_that_cannot_open_the_files_ends_the_load_on_all(self):
        saved(self.tmp, odd_tensors())
        code = """
path = f"{folder}/all" if rank != 1 else f"{folder}/missing"
say(failure(lambda: tensorfs.load_file(path, "np", process_group=group())))
"""
        kind, message = self.all_say(code)
        self.assertEqual(kind, "FileNotFoundError")
        self.assertRegex(message, "rank 1: .*missing")

    def test_a_target_of_one_rank_that_does_not_fit_ends_the_load_on_all_and_the_next_one_works(self):
        saved(self.tmp, {"w": np.ones((4, 5), np.float32)})
        code = """
into = {"w": np.zeros((4, 5) if rank != 2 else (5, 4), np.float32)}
answer = failure(lambda: tensorfs.load_into(into, f"{folder}/all", process_group=group()))
assert not into["w"].any()
with tensorfs.safe_open(f"{folder}/all", "np", process_group=group()) as f:
    assert failure(lambda: f.get_tensors(["nope"] if rank == 0 else None))[1].startswith("rank 0: ")
    assert f.get_tensors()["w"].all()
say(answer)
"""
        kind, message = self.all_say(code)
        self.assertEqual(kind, "MismatchError")
        self.assertIn("rank 2: tensor `w`: the checkpoint has shape [4, 5], the target [5, 4]", message)

    def test_two_states_of_a_store_are_never_mixed(self):
        # The files have the same names, shapes and lengths, but other bytes.
        for which, value in (("one", 1), ("two", 2)):
            (self.tmp / which).mkdir()
            save_file({"w": np.full((100, 10), value, np.float32)}, self.tmp / which / "model.safetensors")
        os.utime(self.tmp / "two/model.safetensors", ns=(0, 10**18))
        code = """
path = f"{folder}/one" if rank != 1 else f"{folder}/two"
say(failure(lambda: tensorfs.load_file(path, "np", process_group=group())))
"""
        kind, message = self.all_say(code)
        self.assertEqual(kind, "GroupError")
        self.assertRegex(message, r"rank 1: it sees model.safetensors of \d+ bytes, changed 2001-09-09 01:46:40.000000000, other")

    def test_a_copy_with_the_same_time_is_another_file_on_the_same_host(self):
        for which in ("one", "two"):
            (self.tmp / which).mkdir()
            save_file({"w": np.zeros(10, np.float32)}, self.tmp / which / "model.safetensors")
            os.utime(self.tmp / which / "model.safetensors", ns=(0, 10**18))
        code = """
path = f"{folder}/one" if rank != 2 else f"{folder}/two"
say(failure(lambda: tensorfs.load_file(path, "np", process_group=group())))
"""
        kind, message = self.all_say(code)
        self.assertEqual(kind, "GroupError")
        self.assertIn("rank 2: its model.safetensors", message)

    def test_a_file_that_changes_after_the_open_is_refused_on_all(self):
        saved(self.tmp, {"w": np.zeros(100_000, np.float32)})
        code = """
with tensorfs.safe_open(f"{folder}/all", "np", process_group=group()) as f:
    with f._team.group.operation() as operation:
        operation.exchange(b"all have opened it")
        if rank == 0:
            with open(f"{folder}/all/model.safetensors", "r+b") as file:
                file.seek(200_000)
                file.write(b"new")
    answer = failure(f.get_tensors)
# Any of the readers may be the first to see it.
say([answer[0], answer[1].partition(": ")[2]])
"""
        _, message = self.all_say(code)
        self.assertIn("model.safetensors: was written to while it was in use", message)

    def test_a_view_of_one_rank_is_refused(self):
        saved(self.tmp, odd_tensors())
        code = """
say(failure(lambda: tensorfs.load_file(f"{folder}/all", "np", process_group=group(), include="a" if rank == 1 else None)))
"""
        kind, message = self.all_say(code)
        self.assertIn("rank 1: it sees other tensors in the same files", message)

    def test_a_rank_that_never_comes_is_named_within_the_deadline(self):
        saved(self.tmp, odd_tensors())
        code = """
if rank == 2:
    say(None)
else:
    before = time.monotonic()
    answer = failure(lambda: tensorfs.load_file(f"{folder}/all", "np", process_group=group(2)))
    assert time.monotonic() - before < 5
    say(answer)
"""
        with Ranks(3, code, self.tmp) as ranks:
            answers = ranks.answers()
        self.assertEqual(answers[0], answers[1])
        self.assertEqual(answers[0], ["GroupError", "rank 2: it did not come to this load within 2 s (io_timeout)"])

    def test_a_rank_that_is_stopped_ends_the_load_on_all(self):
        saved(self.tmp, odd_tensors())
        code = """
with tensorfs.safe_open(f"{folder}/all", "np", process_group=group(3)) as f:
    f.get_tensors()
    say("ready")
    def loads():
        while True:
            f.get_tensors()
    say(failure(loads))
"""
        with Ranks(3, code, self.tmp) as ranks:
            for rank in range(3):
                ranks.line(rank)
            ranks.all[1].send_signal(signal.SIGSTOP)
            first, last = ranks.answers([0, 2], seconds=20)
            ranks.all[1].send_signal(signal.SIGCONT)
            (late,) = ranks.answers([1], seconds=20)
        self.assertEqual(first, last)
        self.assertEqual(first, late)
        self.assertRegex(first[1], r"rank 1: it does not answer within 3 s|rank 1: it did not come")

    def test_a_loop_that_one_rank_leaves_ends_on_the_others(self):
        saved(self.tmp, {f"w{n}": np.ones(3_000_000, np.float32) for n in range(4)})
        code = """
with tensorfs.safe_open(f"{folder}/all", "np", process_group=group()) as f:
    def loop():
        for name, tensor in f.tensors():
            if rank == 1:
                return
    answer = failure(loop)
    whole = f.get_tensors(["w1"])["w1"]
    assert whole.all()
say(answer)
"""
        with Ranks(3, code, self.tmp) as ranks:
            first, mine, last = ranks.answers()
        self.assertIsNone(mine)
        self.assertEqual(first, last)
        self.assertEqual(first, ["GroupError", "rank 1: it left the loop over tensors()"])

    def test_a_storage_that_stalls_ends_the_load_on_all_within_the_deadline(self):
        hf_set(self.tmp / "source", megabytes=6)
        code = """
with tensorfs.safe_open(PATH, "np", process_group=group(3), share=SHARE, io_timeout=3) as f:
    say("ready")
    while not os.path.exists(f"{folder}/stalled"):
        time.sleep(0.01)
    before = time.monotonic()
    answer = failure(f.get_tensors)
    assert time.monotonic() - before < 9, time.monotonic() - before
say(answer)
"""
        with FaultFs(self.tmp / "source") as source:
            for share in ("host", "network"):
                folder = self.tmp / share
                folder.mkdir()
                source.tell("ok")
                with Ranks(3, f"PATH, SHARE = {str(source.path)!r}, {share!r}\n" + code, folder) as ranks:
                    for rank in range(3):
                        ranks.line(rank)
                    source.tell("stall", "model-00002*")
                    (folder / "stalled").touch()
                    with source.lifted():
                        # A process that waits for the source cannot end.
                        answers = [ranks.line(rank) for rank in range(3)]
                self.assertEqual(answers[1:], answers[:-1])
                self.assertEqual(answers[0][0], "TimeoutError")
                self.assertRegex(answers[0][1], "rank [0-2]: .* did not come within 3 s")


class Killed(TestCase):
    def test_a_rank_killed_before_others_open_its_memory_is_named(self):
        saved(self.tmp, odd_tensors())
        code = """
from tensorfs._group import Group
opens, ended, flag = os.open, Group.ended, f"{folder}/missed"
def open_late(path, *arguments):
    if rank == 1 and str(path).startswith("/proc/") and "/fd/" in str(path):
        os.kill(int(path.split("/")[2]), 9)
        while os.path.lexists(path):
            time.sleep(0.001)
        opens(flag, os.O_CREAT)
    return opens(path, *arguments)
def noticed(self, seconds, wake):
    # Not before the memory was missed.
    found = ended(self, seconds, wake)
    if os.path.exists(flag):
        return found
    time.sleep(0.05)
os.open, Group.ended = open_late, noticed
say(failure(lambda: tensorfs.load_file(f"{folder}/all", "np", process_group=group(), share="host")))
"""
        with Ranks(3, code, self.tmp) as ranks:
            answers = ranks.answers([1, 2])
        self.assertEqual(answers, [["GroupError", "rank 0: its process has ended"]] * 2)

    def test_a_rank_killed_at_any_moment_ends_the_load_on_all_others(self):
        saved(self.tmp, odd_tensors())
        choose = random.Random(3)
        for trial in range(KILLS or 8):
            folder = self.tmp / str(trial)
            folder.mkdir()
            share = choose.choice(["host", "network"])
            code = f"""
right = {{name: whole.tobytes() for name, whole in tensorfs.load_file({str(self.tmp / "all")!r}, "np").items()}}
say("ready")
def loads():
    while True:
        with tensorfs.safe_open({str(self.tmp / "all")!r}, "np", process_group=group(6), share="{share}") as f:
            for _ in range(3):
                found = f.get_tensors()
                assert all(whole.tobytes() == right[name] for name, whole in found.items()), "wrong bytes"
            dict(f.tensors(shard=0))
answer = failure(loads)
assert "memfd:tensorfs" not in open("/proc/self/maps").read()
say(answer)
"""
            with Ranks(3, code, folder) as ranks:
                for rank in range(3):
                    ranks.line(rank)
                victim = choose.randrange(3)
                time.sleep(choose.uniform(0, 1.0))
                ranks.all[victim].kill()
                others = [rank for rank in range(3) if rank != victim]
                first, last = ranks.answers(others, seconds=30)
            self.assertEqual(first, last, (trial, share))
            self.assertEqual(first[0], "GroupError")
            self.assertRegex(first[1], f"^rank {victim}: ")


if __name__ == "__main__":
    unittest.main()
