"""Tensors whose elements stand in another order in a remote file: neighbours come with one request."""

import os

import numpy as np

import oracle
import torch_files
from mounts import Mount, TestCase, tensorfs
from object_server import ObjectServer
from torch_files import Tensor

KEY = "models/strided/model.pt"
URL = f"s3://bucket/{KEY}"
# One for each run was 3,000 for `columns`, and 1,024 for `wide`.
REQUESTS_MAX = 60
REQUEST_LEN_MAX = 8 << 20


class RemoteGathers(TestCase):
    def setUp(self):
        super().setUp()
        self.server = ObjectServer().start()
        self.addCleanup(self.server.stop)
        values = np.random.default_rng(7).integers(0, 1 << 24, 3 << 20, np.uint32).astype(np.float32)
        self.tensors = {
            "columns": Tensor(values, (3000, 64), strides=(1024, 1)),
            "far": Tensor(values, (3, 256), strides=(1 << 20, 1)),
            "wide": Tensor(values, (3 << 10, 1 << 10), strides=(1, 3 << 10)),
        }
        file = self.tmp / "model.pt"
        torch_files.save(file, self.tensors)
        self.size = file.stat().st_size
        self.server.put("bucket", KEY, file.read_bytes())
        self.server.objects["bucket"][KEY].date -= 3600
        self.env = {**os.environ, **self.server.environment()}

    def assert_right_with_few_requests(self, path):
        for name, (_, shape, data) in oracle.tensor_bytes(path).items():
            tensor = self.tensors[name]
            strides = [4 * stride for stride in tensor.strides]
            expected = np.lib.stride_tricks.as_strided(tensor.storage, tensor.shape, strides)
            self.assertEqual(shape, list(tensor.shape))
            self.assertTrue(data == expected.tobytes(), name)
        ranges = [line["Range"].split("=")[1].split("-") for line in self.server.requests if line["Range"]]
        lengths = [int(last) - int(first) + 1 for first, last in ranges]
        self.assertLess(len(lengths), REQUESTS_MAX)
        self.assertLessEqual(max(lengths), REQUEST_LEN_MAX)
        self.assertLess(sum(lengths), 6 * self.size)

    def test_consolidate_asks_for_runs_that_lie_near_each_other_with_one_request(self):
        out = self.tmp / "out.safetensors"
        self.assert_done(tensorfs("consolidate", URL, out, env=self.env))
        self.assert_right_with_few_requests(out)

    def test_a_mount_asks_for_runs_that_lie_near_each_other_with_one_request(self):
        with Mount(URL, "watch=off", env=self.env) as mount:
            self.assert_right_with_few_requests(mount.path / "model.safetensors")
