"""How written files take their names: two runs to one place, planted folders, kills."""

import contextlib
import os
import shutil
import stat
import subprocess

import checkpoints
from checkpoints import sparse_file
from faults import slow_file
from mounts import BIN, TestCase, needs_root, run, tensorfs
from test_consolidate import content, loop_mount

OTHER = {"user": 5001, "group": 5001, "extra_groups": []}
PARTIAL = ".out.safetensors.tensorfs-partial"


class TwoRuns(TestCase):
    """Two runs to one place at the same time."""

    def setUp(self):
        super().setUp()
        self.sources, self.expected = [], []
        for number in range(2):
            source = self.tmp / f"source{number}.safetensors"
            checkpoints.write_shard(source, [("t", "U8", [70_000], bytes([number]) * 70_000)])
            good = self.tmp / f"good{number}.safetensors"
            self.assert_done(tensorfs("consolidate", source, good))
            self.sources.append(source)
            self.expected.append(good.read_bytes())
        self.place = self.tmp / "place"
        self.place.mkdir()
        self.out = self.place / "out.safetensors"

    def race(self, command, *words):
        """Runs the command with both sources at once. Returns the exit status and the error line of each."""
        started = [
            subprocess.Popen([BIN, command, source, self.out, *words], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for source in self.sources
        ]
        ended = [process.communicate(timeout=60)[1] for process in started]
        return [(process.returncode, error) for process, error in zip(started, ended, strict=True)]

    @contextlib.contextmanager
    def slow_run(self, command, out, *words):
        """A run that has begun to write `out`, from a slow source; it is killed at the end."""
        with slow_file(self.tmp / f"below{len(os.listdir(self.tmp))}") as source:
            writing = subprocess.Popen([BIN, command, source, out, "--progress=always", *words], stderr=subprocess.PIPE)
            try:
                self.assertTrue(writing.stderr.read(1), "no progress")
                yield
            finally:
                writing.kill()
                writing.stderr.close()
                writing.wait(60)

    def assert_race(self, outcomes, also):
        """At least one run wrote the file, which holds its bytes; the other one says in one line why it did not."""
        won = [number for number, (code, _) in enumerate(outcomes) if code == 0]
        self.assertTrue(won, outcomes)
        self.assertIn(self.out.read_bytes(), [self.expected[number] for number in won])
        for code, error in outcomes:
            if code:
                self.assertEqual(code, 1)
                self.assertRegex(error, f"another process is writing it|{also}")
                self.assertEqual(error.count("\n"), 1, error)
        self.assertEqual(os.listdir(self.place), [self.out.name])

    def test_a_run_that_ends_well_has_written_its_own_bytes(self):
        for command, words in (("consolidate", ()), ("convert", ("--to", "safetensors"))):
            for _ in range(8):
                self.assert_race(self.race(command, *words, "--force"), "never")
                self.out.unlink()
                self.assert_race(self.race(command, *words), "is there already|was made by another program")
                self.out.unlink()

    def test_a_run_to_a_file_that_is_being_written_is_refused_at_its_beginning(self):
        for command in ("consolidate", "convert"):
            for words in ((), ("--force",)):
                with self.slow_run(command, self.out, *words):
                    for other in ("consolidate", "convert"):
                        outcome = tensorfs(other, self.sources[0], self.out, *words)
                        self.assert_refused(outcome)
                        self.assert_one_line(outcome)
                        self.assertIn("another process is writing it", outcome.stderr)
        # The next run takes over the partial folder of the killed ones.
        self.assert_done(tensorfs("convert", self.sources[1], self.out))
        self.assertEqual(os.listdir(self.place), [self.out.name])

    def test_a_file_that_another_program_makes_meanwhile_is_not_replaced(self):
        large = sparse_file(self.tmp / "large.safetensors", 250)
        for command in ("consolidate", "convert"):
            process = subprocess.Popen([BIN, command, large, self.out, "--progress=always"], stderr=subprocess.PIPE)
            self.assertTrue(process.stderr.read(1), "no progress")
            self.out.write_text("mine")
            _, error = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 1)
            self.assertIn(b"was made by another program", error)
            self.assertEqual(self.out.read_text(), "mine")
            self.assertEqual(os.listdir(self.place), [self.out.name])
            self.out.unlink()

    def test_two_long_names_that_begin_alike_are_two_files_and_the_longest_name_fits(self):
        names = [f"{'n' * 240}{number}{'.safetensors':z>14}" for number in range(2)]
        self.assertEqual(len(names[0]), 255)
        with self.slow_run("consolidate", self.place / names[0]):
            for command in ("consolidate", "convert"):
                self.assert_done(tensorfs(command, self.sources[0], self.place / names[1], "--force"))

    def test_force_is_not_advised_where_it_does_not_help(self):
        folder, file = self.tmp / "d.safetensors", self.tmp / "file"
        folder.mkdir()
        file.write_text("x")
        source = checkpoints.hf_set(self.tmp / "set")
        (self.tmp / "full").mkdir()
        (self.tmp / "full/model.safetensors").mkdir()
        for words in (
            ("consolidate", source, file), ("consolidate", source, self.tmp / "full"),
            ("convert", source, file / "x.safetensors"), ("report", source, "--html", folder),
        ):
            for force in ((), ("--force",)):
                outcome = tensorfs(*words, *force)
                self.assertNotEqual(outcome.code, 0)
                self.assertNotIn("--force", outcome.stderr)


@needs_root
class Planted(TestCase):
    """Temporary names that another user of a shared folder made first."""

    def setUp(self):
        super().setUp()
        self.source = checkpoints.hf_set(self.tmp / "source")
        self.shared = self.tmp / "shared"
        self.shared.mkdir()
        self.shared.chmod(0o1777)

    def as_other(self, script):
        self.assert_done(run("sh", "-c", script, cwd=self.shared, **OTHER))

    def assert_kept_out(self, partial, *words):
        """The command refuses in one line what stands at `partial`, and leaves it as it is."""
        before = content(self.shared)
        outcome = tensorfs(*words)
        self.assert_refused(outcome)
        self.assert_one_line(outcome)
        self.assertIn(partial, outcome.stderr)
        self.assertEqual(content(self.shared), before)

    def test_a_folder_of_another_user_is_not_taken_over(self):
        for out, partial in (("out", ".out.tensorfs-partial"), (PARTIAL[1:-17], PARTIAL), ("", ".tensorfs.tensorfs-partial")):
            with self.subTest(out):
                self.as_other(f"mkdir -p {partial}/parts {partial}/tree; chmod -R 777 {partial}; echo evil > {partial}/publishing")
                words = ("consolidate", self.source, self.shared / out)
                self.assert_kept_out(partial, *words)
                self.assertIn("user 5001", tensorfs(*words).stderr)
                if out.endswith(".safetensors"):
                    self.assert_kept_out(partial, "convert", self.source, self.shared / out)
                shutil.rmtree(self.shared / partial)
                self.assert_done(tensorfs(*words))
                for path in self.shared.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()

    def test_a_link_is_not_followed(self):
        victim = self.tmp / "victim"
        victim.mkdir()
        (victim / "parts").mkdir()
        (victim / "parts/0").write_text("victim")
        for target in (victim, self.tmp / "nowhere"):
            self.as_other(f"ln -s {target} {PARTIAL}")
            self.assert_kept_out(PARTIAL, "consolidate", self.source, self.shared / "out.safetensors")
            self.assert_kept_out(PARTIAL, "convert", self.source, self.shared / "out.safetensors")
            (self.shared / PARTIAL).unlink()
        self.assertEqual((victim / "parts/0").read_text(), "victim")

    def test_a_folder_of_ours_that_others_may_write_to_is_not_taken_over(self):
        partial = self.shared / PARTIAL
        partial.mkdir()
        partial.chmod(0o777)
        self.as_other(f"echo evil > {PARTIAL}/part")
        self.assert_kept_out(PARTIAL, "consolidate", self.source, self.shared / "out.safetensors")

    def test_a_link_in_a_folder_that_is_filled_is_not_followed(self):
        # A tree with a folder whose name another user links away while the files are written.
        tree, victim = self.tmp / "tree", self.tmp / "victim"
        checkpoints.hf_set(tree / "model")
        victim.mkdir()
        victim.chmod(0o777)
        self.as_other(f"ln -s {victim} model")
        outcome = tensorfs("consolidate", tree, self.shared, "--force")
        self.assert_refused(outcome)
        self.assertEqual(os.listdir(victim), [])

    def test_another_user_finds_what_root_left_refused_too(self):
        binary = self.tmp / "tensorfs"
        shutil.copy(BIN, binary)
        binary.chmod(0o755)
        if run(binary, "--version", **OTHER).code:
            self.skipTest("other users cannot run this build")
        (self.shared / PARTIAL).mkdir(0o700)
        outcome = run(binary, "consolidate", self.source, self.shared / "out.safetensors", **OTHER, env={**os.environ, "HOME": "/"})
        self.assert_refused(outcome)
        self.assertIn(PARTIAL, outcome.stderr)

    def test_a_run_writes_as_before_where_the_file_system_shows_one_owner_and_mode_for_all(self):
        if not shutil.which("mkfs.vfat"):
            self.skipTest("no mkfs.vfat")
        image = self.tmp / "image"
        image.write_bytes(b"")
        os.truncate(image, 16 << 20)
        self.assert_done(run("mkfs.vfat", image))
        with loop_mount(image, self.tmp / "disk") as disk:
            run("mount", "-o", "remount,uid=5001,umask=000", disk)
            out = disk / "out.safetensors"
            (disk / PARTIAL).mkdir()
            self.assert_done(tensorfs("consolidate", self.source, out))
            self.assertTrue(stat.S_ISREG(out.stat().st_mode))
