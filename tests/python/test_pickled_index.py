"""Indexes of checkpoints with pickles: the same answers as without one, for every kind of set and every option."""

import os
import shutil

import numpy as np

import oracle
import torch_files
from mounts import FIXTURES, Mount, TestCase, tensorfs
from torch_files import Tensor

TORCH = FIXTURES / "torch"

# A source of each kind of set, with the options under which it is opened.
SOURCES = [
    ("bin_index", ()), ("dcp_small", ()), ("dcp_small", ("state=all",)), ("dcp_views", ()), ("dcp_safetensors", ()),
    ("rank_verl_ws4", ()), ("rank_2d_ws4", ()), ("rank_fsdp1_sharded_ws4", ()), ("deepspeed_zero1", ()),
    ("deepspeed_zero2", ("zero=fp32", "state=all")), ("deepspeed_zero3", ()), ("deepspeed_zero3", ("state=all",)),
    ("deepspeed_universal3", ("state=all",)), ("ckpt_lightning.ckpt", ()), ("ckpt_lightning.ckpt", ("state=all",)),
    ("legacy_views.bin", ()), ("zip_views.pt", ()), ("zip_tied.bin", ()),
]


def optioned(options):
    return [word for option in options for word in ("-o", option)]


class PickledIndex(TestCase):
    def setUp(self):
        super().setUp()
        self.index = self.tmp / "index"

    def command(self, name, source, *options, index=None):
        outcome = tensorfs(name, source, "--json", "--index-dir", index or self.index, *optioned(options))
        self.assert_done(outcome)
        return outcome

    def state(self, source, *options):
        (one,) = self.command("index", source, *options).json()["indexes"]
        return one["state"]

    def bytes_of(self, source, *options, index=None):
        out = self.tmp / "out"
        shutil.rmtree(out, ignore_errors=True)
        words = ["--index-dir", index or self.index, *optioned(options)]
        self.assert_done(tensorfs("consolidate", source, out, *words))
        return {path.name: path.read_bytes() for path in sorted(out.rglob("*.safetensors"))}

    def test_every_kind_of_set_is_the_same_from_its_index(self):
        for name, options in SOURCES:
            with self.subTest(name, options=options):
                source = TORCH / name
                told = self.command("inspect", source, *options, index="none").stdout
                data = self.bytes_of(source, *options, index="none")
                self.assertTrue(data)
                self.assertEqual(self.state(source, *options), "built")
                self.assertEqual(self.state(source, *options), "fresh")
                self.assertEqual(self.command("inspect", source, *options).stdout, told)
                self.assertEqual(self.bytes_of(source, *options), data)

    def test_each_state_and_each_source_of_weights_has_an_index_of_its_own(self):
        source = TORCH / "deepspeed_zero2"
        kinds = [(), ("zero=fp32",), ("state=all",), ("zero=fp32", "state=all")]
        told = [self.command("ls", source, *options, index="none").stdout for options in kinds]
        self.assertEqual(len(set(told)), 4)
        for state in ("built", "fresh"):
            self.assertEqual([self.state(source, *options) for options in kinds], [state] * 4)
        self.assertEqual([self.command("ls", source, *options).stdout for options in kinds], told)
        self.assertEqual(len([name for name in os.listdir(self.index) if name.endswith(".index")]), 4)
        outcome = tensorfs("index", source, "--rebuild", "--json", "--index-dir", self.index)
        self.assertEqual([one["state"] for one in outcome.json()["indexes"]], ["rebuilt"])
        self.assertEqual(len(os.listdir(self.index)), 1)

    def test_a_mount_takes_the_sets_from_it(self):
        source = TORCH / "dcp_views"
        self.state(source)
        with Mount(source, f"index-dir={self.index}") as m:
            index = tensorfs("status", m.path, "--json").json()[0]["index"]
            self.assertEqual((index["sets_from_index"], index["sets_from_headers"]), (1, 0))
            self.assert_same((m.path / "model.safetensors").read_bytes(), oracle.from_distcp(source))

    def test_any_change_that_decides_about_the_tensors_is_noticed(self):
        def noticed(name, change, *options):
            with self.subTest(name):
                source = self.tmp / name
                shutil.copytree(TORCH / name.partition("-")[0], source)
                self.assertEqual(self.state(source, *options), "built")
                change(source)
                index = self.command("index", source, *options).json()["indexes"]
                self.assertEqual(index[0]["state"], "rebuilt", index)
                self.assertEqual(self.command("ls", source, *options).stdout,
                                 self.command("ls", source, *options, index="none").stdout)

        step = "global_step1"
        noticed("dcp_small-other", lambda at: (at / "__9_0.distcp").write_bytes(b"x"))
        noticed("dcp_small-metadata", lambda at: swap(at / ".metadata", TORCH / "dcp_threads_ws2/.metadata", at))
        noticed("deepspeed_zero2-ranks", lambda at: (at / step / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink())
        noticed("rank_verl_ws4-name", lambda at: torch_files.save(at / "more.pt", {"w": Tensor(np.zeros(2, np.float32))}))
        noticed("bin_index-other", lambda at: (at / "notes.bin").write_bytes(b"no weights"))

    def test_names_of_weights_without_weights_are_kept_by_their_first_bytes(self):
        source = self.tmp / "model"
        shutil.copytree(TORCH / "bin_index", source)
        other = source / "training.bin"
        other.write_bytes(b"0123456789abcdef" * 4)
        self.assertEqual([self.state(source), self.state(source)], ["built", "fresh"])
        # The same bytes at another time, and then weights.
        os.utime(other, ns=(1, 1))
        self.assertEqual(self.state(source), "fresh")
        torch_files.save(other, {"w": Tensor(np.zeros(1, np.float32))})
        (source / "pytorch_model.bin.index.json").unlink()
        self.assertEqual(self.state(source), "rebuilt")

    def test_the_state_of_an_optimizer_that_is_not_shown_is_not_read(self):
        path = self.tmp / "last.ckpt"
        moments = np.arange(1 << 20, dtype=np.float32)
        torch_files.save(path, {"state_dict": {"w": Tensor(np.ones(9, np.float32))}, "optimizer": {"m": Tensor(moments)}})
        before = self.command("ls", path).stdout
        data = bytearray(path.read_bytes())
        place = bytes(data).index(moments[7:70].tobytes())
        data[place] ^= 1
        path.write_bytes(data)
        # Nothing that is shown follows from these bytes.
        self.assertEqual(self.command("ls", path).stdout, before)
        self.assertEqual(self.state(path), "fresh")
        self.assertIn("the bytes of its entry", tensorfs("verify", path, "--index-dir", self.index).stderr)

    def test_the_mesh_of_ranks_decides_about_the_tensors(self):
        folder = self.tmp / "ranks"
        write_ranks(folder)
        self.assertEqual(self.state(folder), "built")
        path = folder / "model_world_size_2_rank_0.pt"
        data, mesh = path.read_bytes(), np.arange(2).tobytes()
        self.assertEqual(data.count(mesh), 1)
        # The place of the other rank, which its own part does not follow from.
        path.write_bytes(data.replace(mesh, np.array([0, 5]).tobytes()))
        self.assertEqual([self.state(folder), self.state(folder)], ["rebuilt", "fresh"])

    def test_files_of_ranks_that_share_each_tensor_by_what_deepspeed_says_are_refused(self):
        for slices in (1, 2):
            folder = self.tmp / f"slices-{slices}"
            write_ranks(folder, [{"ds_version": "0.19.8", "param_shapes": [{}], "mp_world_size": slices}] * 2, "module")
            outcome = tensorfs("verify", folder, "--index-dir", "none")
            if slices == 1:
                self.assert_done(outcome)
                continue
            self.assert_refused(outcome)
            self.assertIn("rank_0.pt: is the file of one of 2 ranks", outcome.stderr)

    def test_a_tensor_that_differs_between_ranks_is_refused_by_the_crcs(self):
        for values in ((1, 1), (1, 2)):
            folder = self.tmp / f"values-{values[1]}"
            write_ranks(folder, [{"b": Tensor(np.full(3, value, dtype=np.float32))} for value in values])
            outcome = tensorfs("ls", folder, "--index-dir", "none")
            if values == (1, 1):
                self.assert_done(outcome)
                continue
            self.assert_refused(outcome)
            self.assertIn("rank_1.pt: tensor `b`: its bytes differ from those in model_world_size_2_rank_0.pt", outcome.stderr)

    def test_parts_over_one_axis_of_a_mesh_are_joined(self):
        whole = np.arange(12, dtype=np.float32)
        folder = self.tmp / "axis"
        folder.mkdir()
        for rank in range(4):
            with torch_files.modules() as named:
                part = Tensor(whole[rank % 2 * 6 :][:6].copy(), (2, 3))
                root = {"w": torch_files.dtensor(named, part, (4, 3), rank, 4, 0, axis=2)}
                torch_files.save(folder / f"model_world_size_4_rank_{rank}.pt", root)
        self.assert_done(tensorfs("consolidate", folder, self.tmp / "one.safetensors"))
        self.assertEqual(oracle.tensor_bytes(self.tmp / "one.safetensors")["w"][-1], whole.tobytes())


def write_ranks(folder, more=({}, {}), key=None):
    """The files of two ranks, each with half of a tensor, in a dict with this key if there is one, and `more` of each."""
    folder.mkdir()
    for rank in range(2):
        with torch_files.modules() as named:
            part = Tensor(np.arange(6, dtype=np.float32) + rank, (2, 3))
            model = {"w": torch_files.dtensor(named, part, (4, 3), rank, 2, 0)}
            root = {**({key: model} if key else model), **more[rank]}
            torch_files.save(folder / f"model_world_size_2_rank_{rank}.pt", root)


def swap(metadata, other, folder):
    """Another checkpoint in the same place."""
    metadata.write_bytes(other.read_bytes())
    for path in folder.glob("*.distcp"):
        path.unlink()
    for path in other.parent.glob("*.distcp"):
        shutil.copy(path, folder / path.name)
