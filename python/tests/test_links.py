"""Folders of symbolic links: a library reads with the rights of its caller, and follows links to any place."""

import os
import shutil

import numpy as np
from safetensors.numpy import load_file

import tensorfs
from checkpoints import hf_set
from package import Mount, TestCase


class LinkedShards(TestCase):
    def setUp(self):
        super().setUp()
        self.data = hf_set(self.tmp / "data")
        self.links = self.tmp / "links"
        self.links.mkdir()
        self.expected = {}
        for shard in self.data.glob("*.safetensors"):
            self.expected |= load_file(shard)

    def link(self, *paths):
        for path in paths:
            (self.links / path.name).symlink_to(path)

    def assert_loads(self, path):
        with tensorfs.safe_open(path, "np") as opened:
            self.assertEqual(set(opened.keys()), set(self.expected))
            for name, whole in self.expected.items():
                np.testing.assert_array_equal(opened.get_tensor(name), whole, name)
        self.assertEqual(set(tensorfs.numpy.load_file(path)), set(self.expected))

    # `ln -s /data/* .` used to be refused, with advice about a mount option that Python does not have.
    def test_a_folder_of_links_to_shards_elsewhere_opens(self):
        self.link(*self.data.iterdir())
        self.assert_loads(self.links)

    def test_shards_that_are_partly_links_open(self):
        first, *rest = sorted(self.data.iterdir())
        shutil.copy(first, self.links)
        self.link(*rest)
        self.assert_loads(self.links)

    def test_a_hub_folder_whose_blobs_were_moved_opens(self):
        hub, disk = self.tmp / "models--a--b", self.tmp / "disk"
        snapshot = hub / "snapshots/1"
        snapshot.mkdir(parents=True)
        shutil.copytree(self.data, disk)
        (hub / "blobs").symlink_to(disk)
        for path in disk.iterdir():
            (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
        self.assert_loads(snapshot)

    def test_a_weight_map_that_is_a_link_opens(self):
        self.link(*self.data.iterdir())
        self.assert_loads(self.links / "model.safetensors.index.json")

    def test_a_link_to_a_file_on_a_mount_opens(self):
        with Mount(self.data) as mount:
            (self.links / "model.safetensors").symlink_to(mount.path / "model.safetensors")
            self.assert_loads(self.links)
            self.assert_loads(self.links / "model.safetensors")

    def test_links_to_folders_elsewhere_are_not_searched(self):
        self.link(*self.data.iterdir())
        (self.links / "up").symlink_to(self.tmp)
        (self.links / "root").symlink_to("/")
        self.assert_loads(self.links)

    def test_links_that_lead_to_no_file_are_refused_with_one_line(self):
        os.mkfifo(self.tmp / "fifo")
        for target, reason in (
            (self.tmp / "nowhere", "leads nowhere"),
            ("model-00002-of-00003.safetensors", "leads back to itself"),
            (self.tmp / "fifo", "neither a file nor a folder"),
            ("/dev/zero", "neither a file nor a folder"),
        ):
            for with_map in (True, False):
                with self.subTest(target=str(target), with_map=with_map):
                    self.link(*self.data.iterdir())
                    if not with_map:
                        (self.links / "model.safetensors.index.json").unlink()
                    broken = self.links / "model-00002-of-00003.safetensors"
                    broken.unlink()
                    broken.symlink_to(target)
                    for load in (lambda: tensorfs.safe_open(self.links, "np"), lambda: tensorfs.numpy.load_file(self.links)):
                        with self.assertRaises((tensorfs.SafetensorError, OSError)) as caught:
                            load()
                        self.assertIn(broken.name, str(caught.exception))
                        self.assertIn(reason, str(caught.exception))
                        self.assertNotIn("\n", str(caught.exception))
                        self.assertNotIn("follow=", str(caught.exception))
                    shutil.rmtree(self.links)
                    self.links.mkdir()

    def test_a_folder_of_one_broken_link_is_refused_by_its_name(self):
        (self.links / "model.safetensors").symlink_to("nowhere")
        with self.assertRaisesRegex((tensorfs.SafetensorError, OSError), "model.safetensors: is a link that leads nowhere"):
            tensorfs.safe_open(self.links, "np")

    def test_a_folder_of_links_to_folders_says_what_to_do(self):
        (self.links / "there").symlink_to(self.data)
        with self.assertRaisesRegex(tensorfs.SafetensorError, "1 link leads to a folder .*open the folder"):
            tensorfs.safe_open(self.links, "np")
