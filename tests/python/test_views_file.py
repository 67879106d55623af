"""`views=FILE`: several views of one source, each as a folder of one mount."""

import json
import os
import shutil
import time

import checkpoints
from mounts import HANGS, Mount, MountFailed, TestCase, needs_root, read_or_none, tensorfs, visible_files, wait_until
from services import PATIENCE, ServiceCase, mount_config
from test_consolidate import content

FILE = "model.safetensors"
SOURCE = "user.tensorfs.source"

# Each view, and the mount options that say the same.
VIEWS = {
    "half": (['dtype = "f16"', 'keep = ["b"]'], ["dtype=f16", "keep=b"]),
    "names": (['rename = "x.toml"', 'layout = "shards=2"'], ["rename={folder}/x.toml", "layout=shards=2"]),
    "old": (['layout = "original"'], ["layout=original"]),
    "plain": ([], []),
    "rank": (["tp = 2", "rank = 1", 'tp-rules = "tp.toml"'], ["tp=2", "rank=1", "tp-rules={folder}/tp.toml"]),
    "some": (['exclude = "a"', 'format = "bintensors"', 'weight-map = "hide"'], ["exclude=a", "format=bintensors", "weight-map=hide"]),
}


class ViewsCase(TestCase):
    def setUp(self):
        super().setUp()
        self.source = checkpoints.grid_2d(self.tmp / "src")
        (self.source / "config.json").write_text('{"a": 1}')
        (self.tmp / "conf").mkdir()
        (self.tmp / "conf/x.toml").write_text("[[rename]]\nregex = '^'\nto = 'x.'\n")
        (self.tmp / "conf/tp.toml").write_text("[[rule]]\nregex = '.'\ncut = 0\n")
        self.views = self.write(VIEWS)

    def write(self, views, name="views.toml"):
        path = self.tmp / "conf" / name
        path.write_text("".join(f"[view.{view}]\n" + "".join(f"{line}\n" for line in lines) for view, (lines, _) in views.items()))
        return path

    def options(self, view):
        return [option.format(folder=self.tmp / "conf") for option in VIEWS[view][1]]

    def alone(self, source=None):
        """The content of a mount of each view by itself."""
        found = {}
        for view in VIEWS:
            with Mount(source or self.source, *self.options(view)) as m:
                found[view] = content(m.path)
        return found

    def assert_shows(self, folder, expected):
        self.assertEqual(sorted(os.listdir(folder)), sorted(expected))
        for view, files in expected.items():
            found = content(folder / view)
            self.assertEqual(list(found), list(files), view)
            for name, data in files.items():
                self.assert_same(found[name], data, f"{view}/{name}")


class Views(ViewsCase):
    def test_each_view_is_a_folder_with_the_bytes_of_a_mount_with_its_options(self):
        expected = self.alone()
        with Mount(self.source, f"views={self.views}") as m:
            self.assert_shows(m.path, expected)
            inodes = [path.stat().st_ino for path in m.path.rglob("*")]
            self.assertEqual(len(inodes), len(set(inodes)))

    def test_a_tree_of_models_is_shown_in_each_view_and_so_is_one_file(self):
        root = self.tmp / "tree"
        shutil.copytree(self.source, root / "org/one")
        checkpoints.grid_2d(root / "org/two/sharded")
        (root / "README").write_text("text")
        expected = self.alone(root)
        with Mount(root, f"views={self.views}") as m:
            self.assert_shows(m.path, expected)
        with Mount(self.source) as m:
            one = self.tmp / "one.safetensors"
            one.write_bytes((m.path / FILE).read_bytes())
        views = self.write({"half": VIEWS["half"], "plain": VIEWS["plain"]}, "two.toml")
        with Mount(one, f"views={views}") as m, Mount(one, "dtype=f16", "keep=b") as half:
            self.assertEqual([visible_files(m.path / view) for view in ("half", "plain")], [[one.name], [one.name]])
            self.assert_same((m.path / "plain" / one.name).read_bytes(), one.read_bytes())
            self.assert_same((m.path / "half" / one.name).read_bytes(), (half.path / one.name).read_bytes())

    def test_consolidate_writes_each_view_as_a_folder_and_ls_lists_each(self):
        expected = self.alone()
        out = self.tmp / "out"
        self.assert_done(tensorfs("consolidate", self.source, out, "-o", f"views={self.views}", "--verify"))
        self.assert_shows(out, expected)
        listed = tensorfs("ls", self.source, "-o", f"views={self.views}", "--json").json()
        self.assertEqual({one["directory"]: len(one["tensors"]) for one in listed["sets"]},
                         {"half": 2, "names": 2, "old": 2, "plain": 2, "rank": 2, "some": 1})
        with Mount(self.source, f"views={self.views}") as m:
            # Behind the mount lie its source and its views.
            self.assert_done(tensorfs("consolidate", m.path, self.tmp / "behind"))
            self.assert_shows(self.tmp / "behind", expected)
            self.assert_done(tensorfs("consolidate", m.path / "names", self.tmp / "names"))
            self.assertEqual(content(self.tmp / "names"), expected["names"])
            self.assertEqual(tensorfs("verify", m.path, "--json").json()["sets"][0]["ok"], True)

    def test_the_source_of_a_file_is_named_with_the_options_of_its_view(self):
        with Mount(self.source, f"views={self.views}") as m:
            for view, keys in (("half", {"dtype": "f16", "keep": ["b"]}), ("plain", {"layout": "single"}), ("old", {"layout": "original"})):
                known = json.loads(os.getxattr(m.path / view, SOURCE))
                self.assertEqual((known["source"], known["view"] | keys), (str(self.source), known["view"]))
                self.assertNotIn("views", known["view"])
            self.assertEqual(json.loads(os.getxattr(m.path, SOURCE))["view"]["views"], str(self.views))
            listed = tensorfs("ls", m.path / "half", "--json").json()
            self.assertEqual({tensor["name"]: tensor["dtype"] for tensor in listed["sets"][0]["tensors"]}, {"a": "F16", "b": "BF16"})
            # The tensors of a view that has changed since are read through the mount.
            self.views.write_text("[view.half]\ndtype = 'f32'\n")
            listed = tensorfs("ls", m.path / "half", "--json").json()
            self.assertEqual({tensor["name"]: tensor["dtype"] for tensor in listed["sets"][0]["tensors"]}, {"a": "F16", "b": "BF16"})
            status = tensorfs("status", m.path, "--json").json()
            self.assertIn(str(self.views), json.dumps(status))

    # The commands read the mounted source with the new rules, and the mount showed the old ones.
    def test_a_change_of_a_file_that_a_view_names_leaves_the_mount_as_it_is(self):
        views = self.write({"names": (['rename = "x.toml"'], []), "plain": ([], [])}, "two.toml")
        with Mount(self.source, f"views={views}") as m:
            expected = {view: content(m.path / view) for view in ("names", "plain")}
            (self.tmp / "conf/x.toml").write_text("[[rename]]\nregex = '^'\nto = 'y.'\n")
            listed = tensorfs("ls", m.path, "--json").json()
            names = [tensor["name"] for one in listed["sets"] if one["directory"] == "names" for tensor in one["tensors"]]
            self.assertEqual({name[:2] for name in names}, {"x."})
            outcome = tensorfs("consolidate", m.path, self.tmp / "out")
            self.assert_done(outcome)
            self.assertIn(f"{m.path}: read as it is mounted, not from its source: a file of its views has changed", outcome.stderr)
            self.assert_shows(self.tmp / "out", expected)

    # They read the shards without a view, as if none were mounted.
    def test_commands_for_one_view_refuse_a_mount_with_several(self):
        with Mount(self.source, f"views={self.views}") as m:
            out = self.tmp / "out.safetensors"
            page = self.tmp / "page.html"
            for command in (("convert", m.path, out, "--to", "safetensors"), ("load", m.path), ("report", m.path, "--html", page), ("diff", m.path / "plain", m.path)):
                outcome = tensorfs(*command)
                self.assert_refused(outcome, 2)
                self.assertIn(f"{m.path}: several views here, name the folder of one: {m.path / 'half'}", outcome.stderr)
            self.assertFalse(out.exists() or page.exists())
            self.assert_done(tensorfs("convert", m.path / "plain", out, "--to", "safetensors"))
            for command in ("verify", "index"):
                self.assert_done(tensorfs(command, m.path, "--index-dir", self.tmp / "index"))

    def test_checksums_guard_each_view(self):
        index = f"index-dir={self.tmp / 'index'}"
        self.assert_done(tensorfs("verify", self.source, "--index-dir", self.tmp / "index"))
        expected = self.alone()
        with Mount(self.source, f"views={self.views}", "verify=read", index) as m:
            self.assert_shows(m.path, expected)
        shard = min(self.source.glob("*.safetensors"))
        times = shard.stat()
        with open(shard, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))
        with Mount(self.source, f"views={self.views}", "verify=read", index) as m:
            for path in (m.path / "half" / FILE, m.path / "plain" / FILE):
                with self.assertRaises(OSError):
                    path.read_bytes()

    def test_a_view_that_does_not_fit_is_refused_alone_and_says_why(self):
        views = self.write({"none": (["include = 'none*'"], []), "plain": ([], [])}, "some.toml")
        with Mount(self.source, f"views={views}") as m:
            self.assertIn("none*", (m.path / "none/TENSORFS-ERROR.txt").read_text())
            self.assertIn(FILE, os.listdir(m.path / "plain"))
        self.assert_refused(tensorfs("consolidate", self.source, self.tmp / "out", "-o", f"views={views}"))
        self.assertFalse((self.tmp / "out").exists())
        views = self.write({"none": (["include = 'none*'"], [])}, "no.toml")
        with self.assertRaises(MountFailed) as failed:
            self.enter(Mount(self.source, f"views={views}"))
        self.assertIn("none*", failed.exception.stderr)

    def test_files_that_are_no_views_are_refused_in_one_line_before_the_source_is_read(self):
        for text, said in (
            ("", "1 to 100 of them; it has 0"), ("[view.a]\ncolour = 'red'\n", "view `a`: colour=`red`: expected layout"),
            ("[view.a]\n[view.a]\n", "line 2"), ("[view.'a/b']\n", "view `a/b`: the name has to be"),
            ("[view.sharded]\n", "stands for the folder"), ("[view.a]\nrename = 'gone.toml'\n", "gone.toml"),
        ):
            self.views.write_text(text)
            for command in ("ls", "consolidate"):
                with self.subTest(text, command=command):
                    words = [self.tmp / "nothing", *([self.tmp / "out"] if command == "consolidate" else [])]
                    outcome = tensorfs(command, *words, "-o", f"views={self.views}")
                    self.assert_refused(outcome, 2)
                    self.assert_one_line(outcome)
                    self.assertIn(said, outcome.stderr)
        self.write(VIEWS)
        for option, said in (("dtype=f16", "each view has its own options"), ("views=/gone.toml", "is given twice"), ("layout=shards=2", "own options")):
            outcome = tensorfs("ls", self.source, "-o", f"views={self.views}", "-o", option)
            self.assert_refused(outcome, 2)
            self.assertIn(said, outcome.stderr)
        for command in ("verify", "load", "warm", "index"):
            outcome = tensorfs(command, self.source, "-o", f"views={self.views}")
            self.assertNotEqual(outcome.code, 0, command)
            self.assertIn("views", outcome.stderr, command)

    # The words were ignored.
    def test_commands_about_the_bytes_of_the_source_refuse_options_of_views(self):
        for command in ("verify", "index"):
            formats = ("format=bintensors",) if command == "verify" else ()
            for option in (*formats, "include=a", "dtype=f16", "layout=shards=2", "weight-map=hide", "tp=2", "layout=hub", f"views={self.views}"):
                outcome = tensorfs(command, self.source, "-o", option)
                self.assert_refused(outcome, 2)
                self.assert_one_line(outcome)
                self.assertIn(f"{command} is about the bytes of the source", outcome.stderr)


class LiveViews(ViewsCase):
    def test_checkpoints_come_change_and_go_in_every_view(self):
        store = self.tmp / "store"
        store.mkdir()
        views = self.write({"half": (["dtype = 'f16'"], []), "plain": ([], [])}, "live.toml")
        with Mount(store, f"views={views}", "watch=auto") as m:
            self.assertEqual(sorted(os.listdir(m.path)), ["half", "plain"])
            shutil.copytree(self.source, self.tmp / "coming")
            os.rename(self.tmp / "coming", store / "model")
            with Mount(self.source, "dtype=f16") as half, Mount(self.source) as plain:
                right = {"half": (half.path / FILE).read_bytes(), "plain": (plain.path / FILE).read_bytes()}
            for view, data in right.items():
                path = m.path / view / "model" / FILE
                wait_until(lambda path=path, data=data: read_or_none(path) == data, HANGS, f"{view} shows the model")
            new = checkpoints.DcpSet(9).cut("a", (101, 80), (2, 3)).cut("b", (64, 90), (3, 2), 2).save(self.tmp / "new")
            for path in (store / "model").iterdir():
                path.unlink()
            for path in new.iterdir():
                os.rename(path, store / "model" / path.name)
            os.utime(store / "model", ns=(time.time_ns(), time.time_ns()))
            with Mount(store / "model") as plain:
                whole = (plain.path / FILE).read_bytes()
            wait_until(lambda: read_or_none(m.path / "plain/model" / FILE) == whole, HANGS, "the new checkpoint")
            shutil.rmtree(store / "model")
            for view in right:
                wait_until(lambda view=view: os.listdir(m.path / view) == [], HANGS, f"the model leaves {view}")
            self.assertEqual(sorted(os.listdir(m.path)), ["half", "plain"])


@needs_root
class ServedViews(ServiceCase):
    def test_the_service_shows_views_and_goes_on_with_them_over_a_restart(self):
        source = checkpoints.grid_2d(self.tmp / "src")
        views = self.tmp / "views.toml"
        views.write_text("[view.half]\ndtype = 'f16'\n[view.plain]\n")
        with Mount(source, "dtype=f16") as m:
            right = (m.path / FILE).read_bytes()
        target = self.target("a")
        service = self.serve(mount_config("a", source, target, f"views={views}"))
        service.wait_until_ready()
        path = target / "half" / FILE
        wait_until(path.exists, PATIENCE, "the checkpoint is shown")
        self.assert_same(path.read_bytes(), right)
        held = self.open(path)
        self.assert_same(os.pread(held, 1000, 0), right[:1000])
        ready = service.manager.count("READY=1")
        service.restart()
        service.wait_until_ready(ready + 1)
        self.assert_same(os.pread(held, len(right), 0), right)
        self.assert_same((target / "half" / FILE).read_bytes(), right)
        self.assertEqual(sorted(os.listdir(target)), ["half", "plain"])
