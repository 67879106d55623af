"""Process groups of `tensorfs.compat.fastsafetensors` and `tensorfs.compat.instanttensor`: gloo groups on the CPU. If
the genuine fastsafetensors is installed, results are compared with its results."""

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import unittest
from pathlib import Path

import tensorfs
from package import TestCase, needs_torch
from peers import plain, sorted_files, write

# Each rank imports torch first, which takes long.
SECONDS = 200
EVEN = [("w", "F32", (6, 4)), ("b", "BF16", (6, 2)), ("e", "F8_E8M0", (6, 6)), ("none", "I64", (0, 6))]
OTHER = [("v", "F32", (6, 4)), ("u", "U8", (12,)), ("p", "F4", (6, 4)), ("one", "F16", ())]


@needs_torch
class WithGroups(TestCase):
    def setUp(self):
        super().setUp()
        self.x = write(self.tmp / "x.safetensors", EVEN, {"k": "1"})
        self.a = write(self.tmp / "a.safetensors", OTHER)

    def ranks(self, word, size, calls):
        """The outcomes of the calls, rank by rank."""
        store = self.tmp / f"store-{word}-{size}-{len(list(self.tmp.iterdir()))}"
        outs = [Path(f"{store}.{rank}") for rank in range(size)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "TENSORFS_IO_TIMEOUT": "20"}
        script = Path(__file__).with_name("peer_ranks.py")
        running = [
            subprocess.Popen(
                [sys.executable, script, word, str(rank), str(size), store, out, json.dumps(calls)],
                env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank, out in enumerate(outs)
        ]
        try:
            said = [process.communicate(timeout=SECONDS)[0] for process in running]
        finally:
            for process in running:
                process.kill()
                process.wait()
        for out, words in zip(outs, said):
            self.assertTrue(out.exists(), words)
        return [pickle.loads(out.read_bytes()) for out in outs]


@unittest.skipUnless(importlib.util.find_spec("fastsafetensors"), "needs fastsafetensors")
class TestTheSameCalls(WithGroups):
    def same(self, size, calls, raises=()):
        genuine = self.ranks("fastsafetensors", size, calls)
        ours = self.ranks("ours", size, calls)
        for number, call in enumerate(calls):
            for rank in range(size):
                with self.subTest(call, rank=rank, size=size):
                    value, raised, why = genuine[rank][number]
                    found, ours_raised, ours_why = ours[rank][number]
                    if raised is None:
                        self.assertIsNone(ours_raised, ours_why)
                        self.assertEqual(found, value)
                    else:
                        self.assertIsNotNone(ours_raised, f"only the package raises: {why}")
                        self.assertIn(raised[0], ours_raised, f"{why}; ours: {ours_why}")

    def test_calls_in_a_group_of_two(self):
        both = {"files": {0: [self.x], 1: [self.a]}}
        numbered = sorted_files("hf/three_shards")
        calls = [
            {"do": "whole", "names": ["w", "v", "b", "e", "p", "none", "one"], **both},
            # The genuine package fails if a part is empty or shorter than the parts of other ranks, because gloo
            # scatters only equal parts.
            {"do": "tensors", "names": ["w", "v", "b", "e", "u"], "dim": 0, **both},
            {"do": "tensors", "names": ["w", "b", "e", "v"], "dim": 1, **both},
            {"do": "tensors", "names": ["w", "one"], "dim": -1, **both},
            {"do": "tensors", "names": ["no"], "dim": 0, **both},
            {"do": "tensors", "names": ["one"], "dim": 0, **both},
            {"do": "cast", "name": "w", "dtype": "F64", **both},
            {"do": "push", "names": ["w", "v", "b", "e"], "rank": 0, **both},
            {"do": "push", "names": ["w", "p", "none"], "rank": 1, **both},
            {"do": "push", "names": ["no"], "rank": 1, **both},
            {"do": "columns", "names": ["w", "v"], "dim": 0, **both},
            {"do": "columns", "names": ["v", "w"], "dim": 1, **both},
            {"do": "columns", "names": ["e"], "dim": 1, **both},
            {"do": "columns", "names": ["no"], "dim": 1, **both},
            {"do": "all_of", "dims": {"w": 0, "v": 1, "e": -1}, **both},
            {"do": "local", "names": ["w"], **both},
            {"do": "weights", "files": [self.x, self.a]},
            {"do": "weights", "files": [self.a, self.x], "queue_size": -1},
            {"do": "weights", "files": numbered},
            {"do": "weights", "files": [self.x, self.a], "broadcast_run_bytes": 0},
            {"do": "weights", "files": numbered, "all_local": True, "keep": 1},
            {"do": "weights", "files": numbered, "keep": 1},
            {"do": "weights", "files": numbered, "borrowed_tensors": True, "accumulate_resident": False},
            {"do": "weights", "files": []},
        ]
        for files in ({0: [self.x, self.a]}, {1: [self.x, self.a], 0: []}):
            calls += [
                {"do": "whole", "names": ["w", "v"], "files": files},
                {"do": "push", "names": ["w", "v"], "rank": 1, "files": files},
                {"do": "tensors", "names": ["w", "v"], "dim": 0, "files": files},
            ]
        self.same(2, calls)

    def test_calls_in_a_group_of_three(self):
        files = {0: [self.x], 1: [self.a], 2: [write(self.tmp / "m.safetensors", [("m", "F32", (3, 3))])]}
        self.same(3, [
            {"do": "whole", "names": ["w", "v", "m"], "files": files},
            {"do": "tensors", "names": ["w", "v", "m"], "dim": 0, "files": files},
            {"do": "push", "names": ["w", "v", "m"], "rank": 2, "files": files},
            {"do": "columns", "names": ["w", "v"], "dim": 0, "files": files},
            {"do": "weights", "files": [self.x, self.a]},
            {"do": "weights", "files": sorted_files("hf/three_shards")},
        ])


class TestOurs(WithGroups):
    def test_groups_do_more_than_those_of_the_package(self):
        odd = write(self.tmp / "odd.safetensors", [("w", "U8", (5, 2)), ("few", "U8", (1,))])
        shards = sorted_files("dcp/row_wise/shards")
        small = {"chunk_size": 4096, "buffer_size": 4096}
        outcomes = self.ranks("ours", 3, [
            {"do": "tensors", "files": {0: [odd]}, "names": ["w", "few"], "dim": 0},
            {"do": "weights", "files": shards},
            {"do": "instant", "files": shards},
            {"do": "instant", "files": [self.x, self.a]},
            {"do": "instant", "files": [self.x, self.a], "load_now": False, "chunk_size": 4096, "buffer_size": 3 * 4096},
            {"do": "instant", "files": [self.x], **small},
            {"do": "instant", "files": [self.x], "tensor_filter": ["w"]},
            {"do": "twice", "files": {1: [odd], 0: [self.a]}, "name": "few"},
        ])
        with self.subTest("dimensions that do not divide are cut as torch.chunk cuts them"):
            shapes = [[tensor[1] for tensor in parts[0][1]] for parts, *_ in outcomes]
            self.assertEqual(shapes, [[[2, 2], [1]], [[2, 2], [0]], [[1, 2], [0]]])
        self.assertEqual(outcomes[0][1:], outcomes[1][1:])
        self.assertEqual(outcomes[0][1:], outcomes[2][1:])
        _, weights, instant, whole, parts, too_small, filtered, twice = outcomes[0]
        self.assertEqual(twice[0][0], twice[0][1])
        with self.subTest("rank shards are whole"):
            expected = {name: plain(tensor) for name, tensor in tensorfs.load_file(shards).items()}
            self.assertEqual(dict(weights[0]), expected)
            self.assertEqual(dict(instant[0][1]), expected)
        with self.subTest("instanttensor gives all ranks all tensors in file order"):
            self.assertEqual(whole[0][0], ["v", "u", "p", "one", "w", "b", "e", "none"])
            self.assertEqual([name for name, _ in whole[0][1]], whole[0][0])
            self.assertEqual(parts, whole)
        self.assertIn("ValueError", too_small[1])
        self.assertIn("ValueError", filtered[1])

    def test_an_error_of_one_rank_is_an_error_of_all(self):
        files = [self.x, self.a]
        long = [write(self.tmp / f"{number}.safetensors", [(f"t{number}", "U8", (9000,))]) for number in range(3)]
        calls = [
            {"do": "missing", "files": files}, {"do": "leave", "files": files}, {"do": "held", "files": long},
            {"do": "weights", "files": [self.x]},
        ]
        for rank, (missing, left, held, after) in enumerate(self.ranks("ours", 2, calls)):
            self.assertIn("GroupError" if rank else "RuntimeError", held[1], held)
            self.assertIn("FileNotFoundError", missing[1], missing[2])
            if rank:
                self.assertIn("GroupError", left[1], left[2])
            else:
                self.assertEqual(left[0], "w", left[2])
            self.assertIsNone(after[1], after[2])


if __name__ == "__main__":
    unittest.main()
