"""Many shards, few file descriptors."""

import json
import os
import resource

import numpy as np

import checkpoints
from mounts import BIN, Mount, TestCase, run

N_SHARDS = 3000
DESCRIPTORS = 256


def few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))


class ManyShards(TestCase):
    def setUp(self):
        super().setUp()
        self.source = self.tmp / "model"
        self.source.mkdir()
        shards = {}
        for number in range(1, N_SHARDS + 1):
            name = f"model-{number:05}-of-{N_SHARDS:05}.safetensors"
            data = np.arange(number, number + 16, dtype=np.float32).tobytes()
            checkpoints.write_shard(self.source / name, [(f"t{number}", "F32", [4, 4], data)])
            shards[name] = [f"t{number}"]
        checkpoints.write_weight_map(self.source, shards)

    def test_3000_shards_are_read_right_with_256_file_descriptors(self):
        expected = checkpoints.hf_whole(self.source)
        with Mount(self.source, preexec_fn=few_descriptors) as m:
            self.assertEqual(self.limit_of(m), str(DESCRIPTORS))
            with open(m.path / "model.safetensors", "rb") as file:
                self.assertTrue(file.read() == expected)
                for number in (1, 1500, 2999, 3):
                    offset = len(expected) - 64 * number
                    self.assertEqual(os.pread(file.fileno(), 64, offset), expected[offset : offset + 64])

    def limit_of(self, m):
        with open(f"/proc/{m.pid}/limits") as file:
            return next(line for line in file if line.startswith("Max open files")).split()[4]

    def test_3000_shards_are_verified_and_listed_with_256_file_descriptors(self):
        outcome = run(BIN, "verify", self.source, "--json", preexec_fn=few_descriptors)
        self.assert_done(outcome)
        self.assertEqual(outcome.json()["sets"][0]["shards"], N_SHARDS)
        listed = run(BIN, "ls", self.source, "--json", preexec_fn=few_descriptors)
        self.assert_done(listed)
        self.assertEqual(len(json.loads(listed.stdout)["sets"][0]["tensors"]), N_SHARDS)
