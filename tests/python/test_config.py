"""`config=`: small files of another folder beside the weights of a checkpoint that has none, as rank shards."""

import json
import os
import shutil
import stat

import checkpoints
from faults import status_of
from mounts import HANGS, Mount, TestCase, needs_root, read_or_none, tensorfs, visible_files, wait_until
from services import PATIENCE, ServiceCase, mount_config

FILE = "model.safetensors"
SMALL = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}", "chat_template.jinja": b"{{ x }}"}


class Config(TestCase):
    def setUp(self):
        super().setUp()
        self.ranks, self.base = self.tmp / "ranks", self.tmp / "base"
        checkpoints.row_wise(self.ranks)
        # The weights there do not belong to the rank shards.
        checkpoints.numbered_set(self.base, 1)
        (self.base / "pytorch_model.bin").write_bytes(b"x")
        for name, data in SMALL.items():
            (self.base / name).write_bytes(data)
        self.option = f"config={self.base}"

    def assert_small_files(self, folder, small=SMALL):
        self.assertEqual({name: (folder / name).read_bytes() for name in small}, small)

    def test_a_mount_of_rank_shards_shows_the_small_files_of_another_folder_and_no_weights_of_it(self):
        with Mount(self.ranks) as m:
            names = visible_files(m.path)
            whole = (m.path / FILE).read_bytes()
        with Mount(self.ranks, self.option) as m:
            self.assertEqual(visible_files(m.path), sorted([*names, *SMALL]))
            self.assert_small_files(m.path)
            self.assert_same((m.path / FILE).read_bytes(), whole)
            self.assertEqual(status_of(m)[0]["options"]["config"], str(self.base))
        with Mount(self.ranks, f"config={self.base}/config.json") as m:
            self.assertEqual(visible_files(m.path), sorted([*names, "config.json"]))

    def test_the_files_win_over_those_of_the_source_and_follow_changes(self):
        (self.ranks / "config.json").write_text("old")
        (self.ranks / "notes.txt").write_text("of the source")
        with Mount(self.ranks, self.option) as m:
            self.assert_small_files(m.path)
            self.assertEqual((m.path / "notes.txt").read_text(), "of the source")
            with open(self.base / "config.json", "a") as file:
                file.write(" ")
            wait_until(lambda: (m.path / "config.json").read_bytes().endswith(b" "), HANGS, "it is written to")
            (self.base / "next").write_text("new")
            (self.base / "next").rename(self.base / "config.json")
            wait_until(lambda: read_or_none(m.path / "config.json") == b"new", HANGS, "it is replaced")

    def test_consolidate_and_a_mount_on_the_mount_have_the_same_files(self):
        out = self.tmp / "out"
        self.assert_done(tensorfs("consolidate", self.ranks, out, "-o", self.option))
        with Mount(self.ranks, self.option) as m, Mount(m.path) as on_top:
            for folder in (out, on_top.path):
                self.assertEqual(visible_files(folder), visible_files(m.path))
                for name in visible_files(folder):
                    self.assert_same((folder / name).read_bytes(), (m.path / name).read_bytes(), name)
            again = self.tmp / "again"
            self.assert_done(tensorfs("consolidate", m.path, again))
            self.assert_small_files(again)
            # The files belong to the source: none is replaced.
            before = {name: (self.base / name).read_bytes() for name in os.listdir(self.base)}
            self.assert_refused(tensorfs("consolidate", self.ranks, self.base, "-o", self.option, "--force"))
            self.assertEqual({name: (self.base / name).read_bytes() for name in os.listdir(self.base)}, before)

    def test_links_of_the_folder_lead_where_those_of_the_source_may(self):
        (self.tmp / "secret").write_text("secret")
        (self.base / "secret.json").symlink_to(self.tmp / "secret")
        with Mount(self.ranks, self.option) as m:
            self.assertNotIn("secret.json", visible_files(m.path))
        with Mount(self.ranks, self.option, f"follow={self.tmp}") as m:
            self.assertEqual((m.path / "secret.json").read_text(), "secret")

    def test_it_is_for_one_checkpoint_and_needs_a_small_file(self):
        shutil.copytree(self.ranks, self.tmp / "tree/a")
        shutil.copytree(self.ranks, self.tmp / "tree/b")
        empty = self.tmp / "empty"
        empty.mkdir()
        place = self.mount_point()
        for source, config, said in (
            (self.tmp / "tree", self.base, "is for one checkpoint, and"),
            (self.ranks, empty, "no small file there"),
            (self.ranks, self.base / checkpoints.shard_name(1, 3), "no small file there"),
            (self.ranks, self.tmp / "nowhere", "No such file or directory"),
            (self.ranks, "/proc/self", "config=/proc/self: lies on proc, which holds no files"),
            (self.ranks, "/proc/self/status", "lies on proc, which holds no files"),
            (self.ranks, "/sys/kernel", "lies on sysfs, which holds no files"),
        ):
            with self.subTest(said=said):
                outcome = tensorfs("mount", source, place, "-o", f"config={config}")
                self.assertNotEqual(outcome.code, 0)
                self.assertIn(said, outcome.stderr)
                self.assert_one_line(outcome)
        self.assertNotEqual(tensorfs("verify", self.ranks, "-o", self.option).code, 0)

    def test_each_rank_of_a_view_has_the_files_and_is_cut_by_them(self):
        source = checkpoints.DcpSet(4).cut("model.layers.0.mlp.up_proj.weight", (64, 32), (4, 1)).save(self.tmp / "up")
        (self.base / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
        with Mount(source, "tp=2", self.option) as m:
            for rank in range(2):
                self.assertIn("config.json", visible_files(m.path / f"tp-2/rank-{rank}"))


@needs_root
class ServedConfig(ServiceCase):
    """`config=` in a mount of the service."""

    def test_the_files_have_the_rights_of_the_mount_and_stay_open_over_a_restart(self):
        ranks, base, target = self.tmp / "ranks", self.tmp / "base", self.target("a")
        checkpoints.row_wise(ranks)
        base.mkdir()
        for name, data in SMALL.items():
            (base / name).write_bytes(data)
            (base / name).chmod(0o666)
        rules = "allow_other,access=config.json:root:12345:0640,access=**:root:root:0600"
        service = self.serve(mount_config("a", ranks, target, f"config={base},{rules}"))
        service.wait_until_ready()

        def rights():
            found = {name: os.stat(target / name) for name in SMALL}
            return {name: (stat.S_IMODE(of.st_mode), of.st_gid) for name, of in found.items()}

        expected = {name: (0o440, 12345) if name == "config.json" else (0o400, 0) for name in SMALL}
        wait_until((target / "config.json").exists, PATIENCE, "the files are shown")
        self.assertEqual(rights(), expected)
        held, weights = self.open(target / "config.json"), self.open(target / FILE)
        whole = (target / FILE).read_bytes()
        service.restart()
        service.wait_until_ready(2)
        self.assertEqual(os.pread(held, 100, 0), SMALL["config.json"], service.log())
        self.assert_same(os.pread(weights, len(whole), 0), whole)
        self.assertEqual(rights(), expected)
        self.assertEqual({name: (target / name).read_bytes() for name in SMALL}, SMALL)
        self.assertEqual(os.fstat(held).st_dev, os.stat(target).st_dev)
