"""Mounts and commands whose source lies on a mount: they are about what that mount shows, in every view."""

import os
import shutil

import checkpoints
from mounts import Mount, MountFailed, TestCase, needs_root, tensorfs, wait_until
from services import PATIENCE, ServiceCase, mount_config
from test_consolidate import content
from test_view_ranks import model

FILE = "model.safetensors"

# Views of a mount, and a path in it.
MOUNTED = [
    (["dtype=f16"], "."),
    (["dtype=f16"], FILE),
    (["exclude=*norm*"], "."),
    (["tp=2"], "."),
    (["tp=2"], "tp-2/rank-1"),
    (["layout=shards=2", "include=*mlp*"], "."),
    (["layout=original"], "."),
    (["format=bintensors", "weight-map=hide"], "."),
]

# Options that are no options of views.
OTHERS = ["io-timeout=30", "direct=never"]

# Views of a mount of several checkpoints, and options of mounts of what it shows.
LOWERS = ["", "prefer=shards", "layout=original", "layout=original,prefer=shards", "layout=shards=2", "format=bintensors",
          "weight-map=hide", "exclude=*norm*", "layout=hub,format=bintensors"]
UPPERS = ["layout=original", "layout=single,prefer=shards", "layout=shards=3", "format=bintensors", "weight-map=hide",
          "include=*mlp*", "tp=2", "tp=2,rank=1", "layout=single,expect-shards=2", "layout=hub,watch=off"]

ERROR_TEXT = "TENSORFS-ERROR.txt"


def shown_at(path):
    """The content of a folder, or of one file, by name."""
    return content(path) if path.is_dir() else {path.name: path.read_bytes()}


class OnMounts(TestCase):
    def setUp(self):
        super().setUp()
        (self.tmp / "tree").mkdir()
        self.source = model(self.tmp / "tree/llama", "llama")

    def consolidated(self, source, *words):
        """The content of the files that `consolidate` writes."""
        out = self.tmp / "out"
        self.assert_done(tensorfs("consolidate", source, out, *words))
        found = content(out)
        shutil.rmtree(out)
        return found

    def mounted(self, source, *options):
        with Mount(source, *options) as m:
            return content(m.path)

    # The mount had the source of the other one without its view: other dtypes, all tensors, whole ones.
    def test_a_mount_of_a_mount_shows_what_that_mount_shows(self):
        for options, path in MOUNTED:
            with self.subTest(options=options, path=path), Mount(self.source, *options) as m:
                shown = shown_at(m.path / path)
                self.assertEqual(self.mounted(m.path / path), shown)
                self.assertEqual(self.mounted(m.path / path, "verify=none", *OTHERS), shown)

    def test_a_mount_of_a_mount_reads_the_source_and_outlives_the_other_mount(self):
        with Mount(self.source, "exclude=*norm*") as m:
            shown = content(m.path)
            over = self.enter(Mount(m.path))
        self.assertEqual(content(over.path), shown)

    # Any option made a command forget the view of the mount.
    def test_commands_keep_the_view_of_a_mount_with_options_about_other_things(self):
        for options, path in MOUNTED:
            with self.subTest(options=options, path=path), Mount(self.source, *options) as m:
                place, shown = m.path / path, shown_at(m.path / path)
                for other in OTHERS:
                    self.assertEqual(self.consolidated(place, "-o", other), shown)
                for other in ("index-dir=none", "prefer=file"):
                    for command in ("ls", "inspect"):
                        plain, with_option = (tensorfs(command, place, "--json", *words) for words in ((), ("-o", other)))
                        self.assert_done(plain)
                        self.assertEqual(with_option.json(), plain.json())
        with Mount(self.source, "tp=2") as m:
            rank = m.path / "tp-2/rank-1"
            loaded = tensorfs("load", rank, "--json").json()
            again = tensorfs("load", rank, "--json", "-o", "io=pread").json()
            whole = tensorfs("load", self.source, "--json").json()
            self.assertEqual((again["tensors"], again["bytes"]), (loaded["tensors"], loaded["bytes"]))
            self.assertLess(loaded["bytes"], whole["bytes"])
            files = [self.tmp / "one.safetensors", self.tmp / "two.safetensors"]
            for file, words in zip(files, ((), ("-o", "io=pread"))):
                self.assert_done(tensorfs("convert", rank, file, *words))
            self.assert_same(files[1].read_bytes(), files[0].read_bytes())

    def test_a_view_applies_to_what_the_mount_shows(self):
        overs = ["exclude=*gate*", "layout=shards=2", "layout=single", "tp=2,rank=0", "format=bintensors", "dtype=f32"]
        for options in (["dtype=f16"], ["include=*mlp*", "layout=shards=3"], []):
            with Mount(self.source, *options) as m:
                real = self.tmp / "real"
                self.assert_done(tensorfs("consolidate", m.path, real))
                for over in overs:
                    with self.subTest(options=options, over=over):
                        expected = self.mounted(real, over)
                        self.assertEqual(self.mounted(m.path, over), expected)
                        self.assertEqual(self.consolidated(m.path, "-o", over), expected)
                shutil.rmtree(real)

    def test_a_view_that_is_the_default_counts_on_top_of_files_as_they_are(self):
        with Mount(self.source, "layout=original") as m:
            single = self.mounted(self.source)
            self.assertEqual(self.mounted(m.path, "layout=single"), single)
            self.assertEqual(self.consolidated(m.path, "-o", "layout=single"), single)

    def shown_or_refused(self, source, options):
        """The content of a mount; without texts of errors, which name their source. `None` if there is no such mount."""
        try:
            found = self.mounted(source, options)
        except MountFailed:
            return None
        return {name: data for name, data in found.items() if not name.endswith(ERROR_TEXT)}

    # Some combinations showed files and tensors of the source that the mount does not show, or forgot its files.
    def test_options_on_top_of_a_mount_show_what_they_show_of_a_copy_of_its_files(self):
        both = checkpoints.numbered_set(self.tmp / "tree/both", 1)
        checkpoints.write_one(both / FILE, "whole", 2)
        for lower in LOWERS:
            # The name of the folder is the name of a model of a hub.
            with Mount(self.tmp / "tree", *filter(None, [lower])) as m:
                shown, copy = content(m.path), self.tmp / "copy" / m.path.name
                for name, data in shown.items():
                    path = copy / name
                    path.mkdir(parents=True) if data is None else path.write_bytes(data)
                for chosen in ("prefer=file", "prefer=shards"):
                    self.assertEqual(self.mounted(m.path, chosen), shown, (lower, chosen))
                for upper in UPPERS:
                    with self.subTest(lower=lower, upper=upper):
                        self.assertEqual(self.shown_or_refused(m.path, upper), self.shown_or_refused(copy, upper))
                shutil.rmtree(copy)

    # The folder alone was the source, so its links led out of it.
    def test_a_folder_on_a_mount_has_what_links_elsewhere_in_the_source_lead_to(self):
        shared, folder = self.tmp / "tree/shared", self.tmp / "tree/linked"
        self.source.rename(shared)
        folder.mkdir()
        for path in shared.iterdir():
            (folder / path.name).symlink_to(f"../shared/{path.name}")
        with Mount(self.tmp / "tree") as m:
            place = m.path / "linked"
            shown = content(place)
            self.assertIn(FILE, shown)
            self.assertEqual(self.mounted(place), shown)
            self.assertEqual(self.mounted(place / FILE), {FILE: shown[FILE]})
            self.assertEqual(self.consolidated(place), shown)
            for command in ("ls", "load", "verify"):
                for path in (place, place / FILE):
                    self.assert_done(tensorfs(command, path))

    def test_links_of_the_source_of_a_mount_may_lead_to_folders_that_are_given_on_top(self):
        outside, folder = self.tmp / "outside", self.tmp / "tree/linked"
        self.source.rename(outside)
        folder.mkdir()
        for path in outside.iterdir():
            (folder / path.name).symlink_to(path)
        checkpoints.numbered_set(self.tmp / "tree/other", 1)
        with Mount(self.tmp / "tree") as m:
            self.assertNotIn(f"linked/{FILE}", content(m.path))
            self.assertIn(f"linked/{FILE}", self.mounted(m.path, f"follow={outside}"))
            self.assert_done(tensorfs("load", m.path / "linked", "-o", f"follow={outside}"))

    # Texts that the mount makes stood for their folder.
    def test_a_weight_map_on_a_mount_stands_for_its_set_and_a_text_about_errors_for_none(self):
        folder = self.tmp / "tree/several"
        checkpoints.numbered_set(folder, 1)
        for stem in ("second", "broken"):
            made = checkpoints.numbered_set(self.tmp / stem, 2, stem=stem)
            (made / "config.json").unlink()
            [path.rename(folder / path.name) for path in made.iterdir()]
        (folder / checkpoints.shard_name(2, 3, "broken")).unlink()
        with Mount(folder) as m:
            copy = self.tmp / "copy"
            copy.mkdir()
            [(copy / name).write_bytes(data) for name, data in content(m.path).items()]
            for stem in ("model", "second"):
                outcomes = [tensorfs("load", place / f"{stem}.safetensors.index.json", "--json") for place in (m.path, copy)]
                [self.assert_done(outcome) for outcome in outcomes]
                self.assertEqual(outcomes[0].json()["tensors"], outcomes[1].json()["tensors"])
            for place in (m.path, copy):
                self.assertTrue((place / ERROR_TEXT).exists())
                with self.assertRaises(MountFailed), Mount(place / ERROR_TEXT):
                    pass

    def test_files_that_a_mount_shows_changed_are_copied_as_they_are_now(self):
        config = self.source / "config.json"
        for options, words in ((["dtype=f16"], ("-o", "dtype=f32")), (["tp=2"], ())):
            with self.subTest(options=options), Mount(self.source, *options) as m:
                for path in m.path.rglob("*"):
                    path.stat()
                # The kernel keeps the attributes that it has got for a second.
                config.write_text(config.read_text() + "\n")
                found = self.consolidated(m.path, *words)
                texts = {text for name, text in found.items() if name.endswith("config.json")}
                self.assertEqual(texts, {config.read_bytes()})

    def test_one_of_several_files_stands_for_its_set_as_a_real_file_does(self):
        with Mount(self.source, "layout=shards=2", "dtype=f16") as m:
            real = self.tmp / "real"
            self.assert_done(tensorfs("consolidate", m.path, real))
            part = "model-00001-of-00002.safetensors"
            self.assertEqual(self.mounted(m.path / part), self.mounted(real / part))

    def test_several_views_are_refused_by_commands_for_one_also_with_options(self):
        with Mount(self.source, "tp=2") as m:
            for words in ((), ("-o", "io-timeout=30"), ("-o", "dtype=f16")):
                outcome = tensorfs("load", m.path, *words)
                self.assert_refused(outcome, 2)
                self.assertIn("several views here, name the folder of one", outcome.stderr)

    def test_a_mount_as_a_hub_cache_is_shown_by_mounts_that_show_its_start_only(self):
        with Mount(self.tmp / "tree", "layout=hub") as m:
            self.assertEqual(sorted(os.listdir(m.path)), ["models--llama"], os.listdir(m.path))
            with Mount(m.path) as over:
                self.assertEqual(os.listdir(over.path), os.listdir(m.path))
            with self.assertRaises(MountFailed) as failed, Mount(m.path, "watch=auto"):
                pass
            self.assertIn("give watch=off", str(failed.exception))

    def test_a_bench_of_a_mount_takes_its_view_and_refuses_another_one_on_top(self):
        with Mount(self.source, "tp=2") as m:
            outcome = tensorfs("bench", m.path)
            self.assert_refused(outcome, 2)
            self.assertIn("the bench reads one view", outcome.stderr)
            outcome = tensorfs("bench", m.path / "tp-2/rank-0", "-o", "dtype=f16")
            self.assert_refused(outcome, 2)
            self.assertIn("lies on a mount with a view of its own", outcome.stderr)

    def test_options_about_files_are_refused_by_commands_that_read_tensors(self):
        for option in ("layout=shards=100", "layout=original", "format=bintensors", "weight-map=hide"):
            for words in (("load", self.source), ("diff", self.source, self.source)):
                outcome = tensorfs(*words, "-o", option)
                self.assert_refused(outcome, 2)
                self.assert_one_line(outcome)
                self.assertIn(f"option {option}: {words[0]} reads tensors", outcome.stderr)


@needs_root
class ServedOnMounts(ServiceCase):
    # The state named the source behind the other mount, so no process took the mount over.
    def test_readers_of_a_mount_of_a_mount_go_on_over_restarts_and_upgrades(self):
        source = checkpoints.numbered_set(self.tmp / "model", 1)
        below = self.target("below")
        # One is read through the other mount, and begins before it in every order of names.
        views = {"above": ("dtype=f32",), "top": ()}
        overs = [self.target(name) for name in views]
        config = mount_config("below", source, below, "dtype=f16")
        service = self.serve(config)
        service.wait_until_ready()
        wait_until((below / FILE).exists, PATIENCE, "the checkpoint is shown")
        service.reload(config + "".join(mount_config(over.name, below, over, *views[over.name]) for over in overs))
        for over in overs:
            wait_until((over / FILE).exists, PATIENCE, "the checkpoint is shown on top")
        self.assert_same((overs[1] / FILE).read_bytes(), (below / FILE).read_bytes())
        right = {over: (over / FILE).read_bytes() for over in overs}
        held = {over: self.open(over / FILE) for over in overs}
        for _ in range(3):
            before, ready = service.workers(), service.manager.count("READY=1")
            service.restart()
            service.wait_until_ready(ready + 1)
            for over, descriptor in held.items():
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                self.assert_same(os.pread(descriptor, len(right[over]), 0), right[over])
            self.assertTrue(all(service.workers()[name] != pid for name, pid in before.items()))
        self.assertNotIn("cannot be taken over", service.log())
        self.assertNotIn("lost their content", service.log())

    # Both began at once: what the upper one showed, and whether it lived on over a restart, was chance.
    def test_a_mount_starts_once_the_mount_that_its_source_lies_on_serves(self):
        source = checkpoints.numbered_set(self.tmp / "model", 1)
        below, above, top = (self.target(name) for name in ("below", "above", "top"))
        config = mount_config("top", above, top) + mount_config("above", below, above, "dtype=f32")
        service = self.serve(config + mount_config("below", source, below))
        service.wait_until_ready()
        serving = [line for line in service.log().splitlines() if ": serving " in line]
        self.assertEqual([line.split("mount ")[1].split(":")[0] for line in serving], ["below", "above", "top"])
        self.assertEqual(content(above), content(top))
        self.assertNotIn("is watched", service.log())

    def test_a_mount_is_refused_while_the_mount_that_its_source_lies_on_fails(self):
        source, other = self.tmp / "model", checkpoints.numbered_set(self.tmp / "other", 2)
        below, above, third = (self.target(name) for name in ("below", "above", "third"))
        mounts = mount_config("above", below, above) + mount_config("third", other, third)
        service = self.serve(mounts + mount_config("below", source, below))
        service.wait_until_ready()
        line = "mount above: its source lies on mount below, which does not serve"
        self.assertEqual((service.log().count(line), os.listdir(above)), (1, []))
        service.wait_for_status("above failed: its source lies on mount below")
        checkpoints.numbered_set(source, 1)
        wait_until((above / FILE).exists, PATIENCE, "the checkpoint is shown")
        self.assertEqual((content(above), service.log().count(line)), (content(below), 1))

    # The upper mount looked for its source on the lower one again, which was just made anew.
    def test_readers_of_a_mount_go_on_if_the_mount_that_its_source_lies_on_is_made_anew(self):
        source = checkpoints.numbered_set(self.tmp / "model", 1)
        below, above = self.target("below"), self.target("above")
        over = mount_config("above", below, above, "layout=shards=2")
        service = self.serve(mount_config("below", source, below) + over)
        service.wait_until_ready()
        files = [above / name for name in sorted(os.listdir(above)) if name.endswith(".safetensors")]
        held = [(self.open(path), path.read_bytes()) for path in files]
        self.assertEqual(len(held), 2)
        service.file.write_text(mount_config("below", source, below, "dtype=f32") + over)
        ready = service.manager.count("READY=1")
        service.restart()
        service.wait_until_ready(ready + 1)
        for descriptor, right in held:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            self.assert_same(os.pread(descriptor, len(right), 0), right)
        self.assertIn("below", [line.split("mount ")[1].split(":")[0] for line in service.log().splitlines() if "mounted anew" in line])
        self.assertNotIn("above: cannot be taken over", service.log())

    def test_a_mount_that_reads_through_a_mount_that_does_not_come_back_is_not_one_of_the_folder_below(self):
        source, other = (checkpoints.numbered_set(self.tmp / name, 1) for name in ("model", "other"))
        below, above, third = (self.target(name) for name in ("below", "above", "third"))
        checkpoints.write_one(below / FILE, "hidden", 3)
        rest = mount_config("above", below, above, "dtype=f32") + mount_config("third", other, third)
        service = self.serve(mount_config("below", source, below, "dtype=f16") + rest)
        service.wait_until_ready()
        wait_until((above / FILE).exists, PATIENCE, "the checkpoint is shown on top")
        service.file.write_text(mount_config("below", self.tmp / "gone", below, "dtype=f16") + rest)
        ready = service.manager.count("READY=1")
        service.restart()
        service.wait_until_ready(ready + 1)
        service.wait_for_status("above failed: its source lies on mount below, which does not serve")
        with self.assertRaises(OSError):
            (above / FILE).read_bytes()

    def test_a_mount_of_a_hub_cache_on_a_mount_is_served(self):
        checkpoints.numbered_set(self.tmp / "tree/model", 1)
        below, above = self.target("below"), self.target("above")
        config = mount_config("below", self.tmp / "tree", below, "layout=hub") + mount_config("above", below, above)
        service = self.serve(config)
        service.wait_until_ready()
        self.assertEqual(content(above), content(below))
        self.assertNotIn("watch=off", service.log())
