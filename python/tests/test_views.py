"""Views of checkpoints: files on a mount are read from the shards, and have the tensors that the mount shows."""

import json
import re

import numpy as np
from safetensors.numpy import load_file, save_file

import tensorfs
from checkpoints import DcpSet, hf_set
from package import Mount, TestCase


def grid(folder):
    return DcpSet(4).cut("a", (101, 801), (2, 3)).cut("b", (64, 900), (3, 2), 8).save(folder)


class MountedViews(TestCase):
    def test_a_file_of_several_has_its_own_tensors_and_is_read_from_the_shards(self):
        for source in (hf_set(self.tmp / "hf"), grid(self.tmp / "grid")):
            with Mount(source, "layout=shards=2") as m:
                weight_map = json.loads((m.path / "model.safetensors.index.json").read_text())["weight_map"]
                for name in sorted(set(weight_map.values())):
                    expected = load_file(m.path / name)
                    with tensorfs.safe_open(m.path / name, "np") as opened:
                        self.assertEqual(set(opened.keys()), {t for t, file in weight_map.items() if file == name})
                        paths = {path for t in opened.keys() for path, *_ in opened.get_tensor_metadata(t).pieces}
                        self.assertTrue(all(path.startswith(str(source)) for path in paths), paths)
                    for tensor, value in tensorfs.numpy.load_file(m.path / name).items():
                        self.assertEqual(value.tobytes(), expected[tensor].tobytes(), tensor)
                whole = tensorfs.numpy.load_file(m.path)
                self.assertEqual(set(whole), set(weight_map))

    def test_each_of_several_views_is_read_from_the_shards_with_its_own_options(self):
        source = grid(self.tmp / "grid")
        views = self.tmp / "views.toml"
        views.write_text('[view.half]\ndtype = "f16"\n[view.two]\nlayout = "shards=2"\n')
        with Mount(source, f"views={views}") as m:
            for view in ("half", "two"):
                expected = {}
                for path in (m.path / view).glob("*.safetensors"):
                    expected |= load_file(path)
                with tensorfs.safe_open(m.path / view, "np") as opened:
                    paths = {path for t in opened.keys() for path, *_ in opened.get_tensor_metadata(t).pieces}
                    self.assertTrue(all(path.startswith(str(source)) for path in paths), paths)
                found = tensorfs.numpy.load_file(m.path / view)
                self.assertEqual({name: (str(t.dtype), t.tobytes()) for name, t in found.items()},
                                 {name: (str(t.dtype), t.tobytes()) for name, t in expected.items()})

    def test_a_list_that_has_changed_since_the_mount_is_not_used(self):
        source = grid(self.tmp / "grid")
        mapping = self.tmp / "map.json"
        mapping.write_text('{"a": 1, "b": 2}')
        with Mount(source, f"layout=map={mapping}") as m:
            mapping.write_text('{"a": 2, "b": 1}')
            names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
            found = [list(tensorfs.numpy.load_file(m.path / name)) for name in names]
            self.assertEqual(found, [["a"], ["b"]])
            np.testing.assert_array_equal(tensorfs.numpy.load_file(m.path / names[0])["a"], load_file(m.path / names[0])["a"])


class Arguments(TestCase):
    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(1)
        self.source = self.tmp / "hf"
        self.source.mkdir()
        self.expected = {}
        for shard in (1, 2):
            tensors = {
                f"l.{shard}.w": rng.standard_normal((33, 301)).astype(np.float32),
                f"l.{shard}.norm": rng.standard_normal(77),
                f"l.{shard}.ids": np.arange(shard, 9),
            }
            save_file(tensors, self.source / f"model-{shard:05}-of-00002.safetensors")
            self.expected |= tensors
        self.rules = self.tmp / "rules.toml"
        self.rules.write_text("[[rename]]\nregex = '^l\\.(\\d)\\.'\nto = 'x.$1.'\n")
        self.how = {"exclude": "l.1.ids", "rename": self.rules, "dtype": "f16", "keep": ["*.norm"]}
        self.wanted = {
            name.replace("l.", "x."): value.astype(np.float16) if name.endswith("w") else value
            for name, value in self.expected.items()
            if name != "l.1.ids"
        }

    def assert_wanted(self, found):
        self.assertEqual(set(found), set(self.wanted))
        for name, value in self.wanted.items():
            self.assertEqual(found[name].dtype, value.dtype, name)
            np.testing.assert_array_equal(found[name], value, name)

    def test_loads_select_rename_and_cast_as_numpy_does(self):
        shards = sorted(self.source.iterdir())
        for source in (self.source, shards, {name: shards[int(name[2]) - 1] for name in self.expected}):
            self.assert_wanted(tensorfs.numpy.load_file(source, **self.how))
        with tensorfs.safe_open(self.source, "np", **self.how) as opened:
            for name, value in self.wanted.items():
                np.testing.assert_array_equal(opened.get_tensor(name), value, name)
                np.testing.assert_array_equal(opened.get_slice(name)[1:5], value[1:5], name)
                self.assertEqual(opened.get_tensor_metadata(name).nbytes, value.nbytes)
            self.assert_wanted(dict(opened.tensors()))

    def test_another_checkpoint_may_say_the_dtypes(self):
        like = self.tmp / "like"
        like.mkdir()
        dtypes = {name: np.float16 if value.dtype == np.float32 else value.dtype for name, value in self.expected.items()}
        save_file({name: np.zeros(3, dtype) for name, dtype in dtypes.items()}, like / "model.safetensors")
        found = tensorfs.numpy.load_file(self.source, dtype=f"like:{like}")
        for name, value in self.expected.items():
            self.assertEqual(found[name].dtype, dtypes[name], name)
            np.testing.assert_array_equal(found[name], value.astype(dtypes[name]), name)
        tensorfs.consolidate(self.source, self.tmp / "out", dtype=f"like:{like}")
        written = tensorfs.numpy.load_file(self.tmp / "out")
        self.assertEqual({name: value.dtype for name, value in written.items()}, dtypes)

    def test_without_a_copy_cast_tensors_have_memory_of_their_own(self):
        self.assert_wanted(tensorfs.numpy.load_file(self.source, copy=False, **self.how))

    def test_behind_a_mount_the_view_of_the_mount_counts_and_the_arguments_after_it(self):
        options = ["exclude=l.1.ids", f"rename={self.rules}", "dtype=f16", "keep=*.norm"]
        for layout in ([], ["layout=shards=2"]):
            with Mount(self.source, *options, *layout) as m:
                self.assert_wanted(tensorfs.numpy.load_file(m.path))
                names = sorted(path.name for path in m.path.glob("*.safetensors"))
                found = {}
                for name in names:
                    found |= tensorfs.numpy.load_file(m.path / name)
                    with tensorfs.safe_open(m.path / name, "np") as opened:
                        paths = {path for t in opened.keys() for path, *_ in opened.get_tensor_metadata(t).pieces}
                    self.assertTrue(all(path.startswith(str(self.source)) for path in paths), paths)
                self.assert_wanted(found)
                only = tensorfs.numpy.load_file(m.path, include="x.2.*", exclude="*.norm")
                self.assertEqual(set(only), {"x.2.w", "x.2.ids"})
                np.testing.assert_array_equal(only["x.2.w"], self.wanted["x.2.w"])

    def test_split_and_joined_tensors_are_loaded_as_numpy_makes_them(self):
        self.rules.write_text("""
            [[split]]
            regex = '^l\\.(\\d)\\.w$'
            to = ['l.$1.left', 'l.$1.right']
            sizes = [100, 201]
            dim = 1
            [[fuse]]
            from = ['l.2.right', 'l.1.right']
            to = 'both'
            [[fuse]]
            from = ['l.2.norm', 'l.1.norm']
            to = 'norms'
        """)
        l1, l2 = self.expected["l.1.w"], self.expected["l.2.w"]
        wanted = {
            "l.1.left": l1[:, :100], "l.2.left": l2[:, :100], "both": np.concatenate([l2[:, 100:], l1[:, 100:]]),
            "norms": np.concatenate([self.expected["l.2.norm"], self.expected["l.1.norm"]]),
            "l.1.ids": self.expected["l.1.ids"], "l.2.ids": self.expected["l.2.ids"],
        }
        for copy in (True, False):
            found = tensorfs.numpy.load_file(self.source, rename=self.rules, copy=copy)
            self.assertEqual(set(found), set(wanted))
            for name, value in wanted.items():
                np.testing.assert_array_equal(found[name], value, name)
        with tensorfs.safe_open(self.source, "np", rename=self.rules) as opened, Mount(self.source, f"rename={self.rules}") as m:
            behind = tensorfs.numpy.load_file(m.path)
            for name, value in wanted.items():
                np.testing.assert_array_equal(opened.get_tensor(name), value, name)
                np.testing.assert_array_equal(opened.get_slice(name)[2:5], value[2:5], name)
                if value.ndim == 2:
                    np.testing.assert_array_equal(opened.get_slice(name)[3:, 7:50], value[3:, 7:50], name)
                np.testing.assert_array_equal(behind[name], value, name)
                self.assertEqual(opened.get_tensor_metadata(name).nbytes, value.nbytes)
                self.assertIsNone(opened.get_tensor_metadata(name).data_offsets)
        half = tensorfs.numpy.load_file(self.source, rename=self.rules, dtype="f16")
        np.testing.assert_array_equal(half["both"], wanted["both"].astype(np.float16))

    def test_a_tensor_that_is_cast_or_cut_by_columns_claims_no_bytes_of_the_file(self):
        folder = self.tmp / "columns"
        folder.mkdir()
        save_file({"w": np.arange(24, dtype=np.float16).reshape(2, 12)}, folder / "model.safetensors")
        self.rules.write_text("[[split]]\nfrom = 'w'\nto = ['a', 'b']\ndim = 1\nsizes = [4, 8]\n")
        with tensorfs.safe_open(folder, "np") as opened:
            self.assertEqual(opened.get_tensor_metadata("w").data_offsets, (0, 48))
        for options in ({"rename": self.rules}, {"dtype": "bf16"}, {"rename": self.rules, "dtype": "f32"}):
            with tensorfs.safe_open(folder, "np", **options) as opened:
                for name in opened.keys():
                    self.assertIsNone(opened.get_tensor_metadata(name).data_offsets, options)

    def test_a_rank_has_its_slices(self):
        self.rules.write_text("[[rule]]\nregex = '\\.w$'\ncut = 1\n[[rule]]\nregex = '\\.norm$'\ncut = 0\n")
        for rank in (0, 2):
            def own(value, dim):
                return np.take(value, range(-(-value.shape[dim] // 3) * rank, value.shape[dim]), axis=dim) if rank else value[
                    tuple(slice(0, -(-size // 3)) if at == dim else slice(None) for at, size in enumerate(value.shape))
                ]

            wanted = {
                name: own(value, 1) if name.endswith("w") else own(value, 0) if name.endswith("norm") else value
                for name, value in self.expected.items()
            }
            how = {"tp": 3, "rank": rank, "tp_rules": self.rules}
            for copy in (True, False):
                found = tensorfs.numpy.load_file(self.source, copy=copy, **how)
                self.assertEqual(set(found), set(wanted))
                for name, value in wanted.items():
                    np.testing.assert_array_equal(found[name], value, name)
            with tensorfs.safe_open(self.source, "np", **how) as opened:
                for name, value in wanted.items():
                    np.testing.assert_array_equal(opened.get_slice(name)[1:3], value[1:3], name)
            with Mount(self.source, "tp=3", f"rank={rank}", f"tp-rules={self.rules}") as m:
                for name, value in tensorfs.numpy.load_file(m.path).items():
                    np.testing.assert_array_equal(value, wanted[name], name)
            out = self.tmp / f"out{rank}"
            tensorfs.consolidate(self.source, out, **how)
            for name, value in load_file(out / "model.safetensors").items():
                np.testing.assert_array_equal(value, wanted[name], name)

    def test_the_family_of_a_model_decides_how_it_is_cut(self):
        config = {"model_type": "gpt_neox", "num_attention_heads": 4}
        names = ["gpt_neox.embed_in", "l.0.attention.query_key_value", "l.0.attention.dense", "l.0.mlp.dense_h_to_4h",
                 "l.0.mlp.dense_4h_to_h"]
        tensors = {f"{name}.weight": np.arange(16 * 8, dtype=np.float32).reshape(16, 8) + at for at, name in enumerate(names)}
        folder = self.tmp / "neox"
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        with self.assertRaisesRegex(tensorfs.SafetensorError, "config.json"):
            tensorfs.numpy.load_file(folder, tp=2, rank=1)
        (folder / "config.json").write_text(json.dumps(config))
        for source in (folder, folder / "model.safetensors", [folder / "model.safetensors"]):
            found = tensorfs.numpy.load_file(source, tp=2, rank=1)
            for name, value in tensors.items():
                by_input = "attention.dense" in name or "4h_to_h" in name
                np.testing.assert_array_equal(found[name], value[:, 4:] if by_input else value[8:], name)

    def test_what_does_not_fit_is_refused_with_the_argument(self):
        for how, said in (
            ({"include": "none*"}, "none*"), ({"dtype": "f8"}, "dtype=`f8`: expected bf16"), ({"keep": "*"}, "keep needs"),
            ({"rename": self.tmp / "gone.toml"}, "gone.toml"), ({"dtype": "f16", "keep": "none*"}, "none*"),
            ({"include": "["}, "include=`[`"), ({"tp": 2}, "rank="), ({"rank": 0}, "tp="), ({"tp": 2, "rank": 2}, "0 to 1"),
            ({"tp": 2, "rank": 0, "tp_rules": self.tmp / "gone.toml"}, "gone.toml"),
        ):
            with self.subTest(how), self.assertRaisesRegex(tensorfs.SafetensorError, re.escape(said)):
                tensorfs.safe_open(self.source, "np", **how)
        with self.assertRaises(TypeError):
            tensorfs.safe_open(self.source, "np", include=[1])
        with self.assertRaises(TypeError):
            tensorfs.safe_open(self.source, "np", tp="2", rank=0)
