"""`consolidate` after a run that was killed: it goes on, and the files are those of an undisturbed run."""

import os
import random
import re
import shutil
import signal
import subprocess

import checkpoints
from checkpoints import sparse_file
from faults import FaultFs, file_system
from mounts import BIN, TestCase, needs_root, tensorfs, wait_until
from test_consolidate import content

MEGABYTE = 1 << 20

# 17 rounds are 51 files, each after up to three kills.
ROUNDS = int(os.environ.get("TENSORFS_TEST_ROUNDS", "3"))


class Resumed(TestCase):
    def setUp(self):
        super().setUp()
        self.place = self.tmp / "place"
        self.place.mkdir()
        self.below = self.tmp / "source"
        self.below.mkdir()
        self.faults = FaultFs(self.below)
        self.faults.start()
        self.addCleanup(self.faults.stop)

    def kill(self, *words, once=lambda: True, after=0.0):
        """Starts a run, and kills it once `once` and `after` seconds later, or finds that it was faster."""
        process = subprocess.Popen([BIN, "consolidate", *words, "--progress=always"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        process.stderr.read(1)
        wait_until(lambda: once() or process.poll() is not None, 60, "the moment")
        try:
            process.wait(after)
        except subprocess.TimeoutExpired:
            process.kill()
        # A killed process does not end before the reads that it waits for.
        self.faults.tell("resume")
        process.stderr.close()
        return process.wait(60)

    def finish(self, *words):
        outcome = tensorfs("consolidate", *words, "--json")
        self.assert_done(outcome)
        return outcome.json()

    def ranges(self, partial):
        """Ends of the ranges in the journal."""
        journal = self.place / partial / "journal"
        return [int(end) for end in re.findall(r"^range \d+ \d+ (\d+) ", journal.read_text(), re.M)] if journal.exists() else []

    def assert_only(self, *names):
        self.assertEqual(sorted(os.listdir(self.place)), sorted(names))

    def test_runs_that_are_killed_at_random_points_end_in_the_bytes_of_an_undisturbed_run(self):
        source = checkpoints.hf_set(self.tmp / "set", 3, 24 if ROUNDS > 3 else 9)
        (source / "config.json").write_text("{}")
        good = self.tmp / "good"
        whole = tensorfs("consolidate", source, good).seconds
        one = self.tmp / "good.safetensors"
        self.assert_done(tensorfs("consolidate", source, one))
        rng = random.Random(23)
        reused = killed = 0
        for number in range(ROUNDS):
            new, existing, file = self.place / "new", self.place / "existing", self.place / "x.safetensors"
            existing.mkdir()
            (existing / "mine").write_text("mine")
            for out in (new, existing, file):
                words = (source, out, "-o", f"direct={rng.choice(('auto', 'never', 'always'))}")
                for _ in range(rng.choice((1, 1, 3))):
                    killed += self.kill(*words, after=rng.random() * whole) == -signal.SIGKILL
                # The run may have ended before it was killed, and its last moment has no trace.
                last = tensorfs("consolidate", *words, *(("--verify",) if number % 2 else ()), "--json")
                if last.code:
                    self.assertIn("is there already", last.stderr)
                else:
                    reused += last.json()["reused"]
            self.assertEqual(content(new), content(good))
            self.assertEqual(content(existing), {**content(good), "mine": b"mine"})
            self.assert_same(file.read_bytes(), one.read_bytes())
            self.assert_only("new", "existing", "x.safetensors")
            for path in self.place.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        # In few rounds every run may be faster than its kill.
        if ROUNDS > 3:
            self.assertGreater(killed, 0)
            self.assertGreater(reused, 0)

    def killed_half_way(self, out, *words):
        """A source of 60 MB, of which a killed run to `out` has written a part, and the number of bytes in its journal.

        The run cannot end before it is killed: the source stalls behind 40 MiB.
        """
        with open(sparse_file(self.below / "large.safetensors", 60), "r+b") as file:
            file.seek(20 * MEGABYTE)
            file.write(random.Random(1).randbytes(MEGABYTE))
        source = self.faults.path / "large.safetensors"
        partial = f".{out.name}.tensorfs-partial"
        self.faults.tell("stall", "*", 40 * MEGABYTE)
        self.assertEqual(self.kill(source, out, *words, once=lambda: max(self.ranges(partial), default=0) > 24 * MEGABYTE), -signal.SIGKILL)
        return source, max(self.ranges(partial))

    def test_what_was_written_is_reused_and_said(self):
        out = self.place / "x.safetensors"
        source, _ = self.killed_half_way(out)
        self.assert_only(".x.safetensors.tensorfs-partial")
        outcome = tensorfs("consolidate", source, out)
        self.assert_done(outcome)
        self.assertRegex(outcome.stdout, r"[\d.]+ MiB reused from a run that was killed")
        self.assert_same(out.read_bytes(), self.fresh(source))
        self.assert_only("x.safetensors")
        self.assertEqual(self.finish(source, out, "--force")["reused"], 0)

    def test_the_file_has_the_rights_that_the_umask_of_the_last_run_leaves(self):
        out = self.place / "x.safetensors"
        source, _ = self.killed_half_way(out)
        outcome = tensorfs("consolidate", source, out, "--json", umask=0o077)
        self.assert_done(outcome)
        self.assertGreater(outcome.json()["reused"], 0)
        self.assertEqual(out.stat().st_mode & 0o777, 0o600)

    def fresh(self, source, *words):
        out = self.tmp / "fresh.safetensors"
        self.assert_done(tensorfs("consolidate", source, out, "--force", *words))
        return out.read_bytes()

    def test_bytes_that_are_no_longer_there_are_written_again(self):
        out, fresh = self.place / "x.safetensors", None
        for damage in ("flip", "cut", "hole", "lost", "journal"):
            source, written = self.killed_half_way(out)
            partial = self.place / ".x.safetensors.tensorfs-partial"
            part, journal = partial / "parts/0", partial / "journal"
            at = 10 * MEGABYTE
            with open(journal if damage == "journal" else part, "r+b") as file:
                if damage == "flip":
                    file.seek(at)
                    byte = file.read(1)
                    file.seek(at)
                    file.write(bytes([byte[0] ^ 1]))
                elif damage == "cut":
                    file.truncate(at)
                elif damage == "hole":
                    at = 20 * MEGABYTE
                    file.seek(at)
                    file.write(bytes(MEGABYTE))
                elif damage == "journal":
                    # A loss of power leaves zeros.
                    size = journal.stat().st_size
                    file.seek(size // 2)
                    file.write(bytes(size - size // 2))
            if damage == "lost":
                part.unlink()
                at = 0
            found = self.finish(source, out, "--verify")
            self.assertLessEqual(found["reused"], written - 1 if damage == "journal" else at)
            self.assertEqual(found["reused"] > 0, damage != "lost", damage)
            fresh = fresh or self.fresh(source)
            self.assert_same(out.read_bytes(), fresh, damage)
            out.unlink()
            self.assert_only()

    def test_another_version_of_the_source_other_options_and_another_format_begin_anew(self):
        out = self.place / "x.safetensors"
        source, _ = self.killed_half_way(out)
        with open(self.below / source.name, "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        self.assertEqual(self.finish(source, out)["reused"], 0)
        self.assert_same(out.read_bytes(), self.fresh(source))
        out.unlink()
        source, _ = self.killed_half_way(out)
        (self.tmp / "rename.toml").write_text("[[rename]]\nregex = '^t'\nto = 'u'\n")
        words = ("-o", f"rename={self.tmp / 'rename.toml'}")
        self.assertEqual(self.finish(source, out, *words)["reused"], 0)
        self.assert_same(out.read_bytes(), self.fresh(source, *words))
        out.unlink()
        source, _ = self.killed_half_way(out)
        journal = self.place / ".x.safetensors.tensorfs-partial/journal"
        journal.write_text(journal.read_text().replace("consolidate 1", "consolidate 0", 1))
        self.assertEqual(self.finish(source, out)["reused"], 0)
        self.assert_only("x.safetensors")

    def test_a_link_in_the_place_of_a_part_is_replaced_and_not_written_through(self):
        out = self.place / "x.safetensors"
        source, _ = self.killed_half_way(out)
        victim = self.tmp / "victim"
        victim.write_text("victim")
        part = self.place / ".x.safetensors.tensorfs-partial/parts/0"
        for make in (os.symlink, os.link):
            part.unlink()
            make(victim, part)
            if make == os.symlink:
                continue
            self.assertEqual(self.finish(source, out)["reused"], 0)
        self.assertEqual(victim.read_text(), "victim")

    @needs_root
    def test_a_run_that_a_full_disk_ended_goes_on_once_there_is_space(self):
        source = checkpoints.hf_set(self.tmp / "set", 2, 12)
        with file_system("tmpfs", self.tmp / "small", "-o", "size=40m") as small:
            for out in (small / "new", small / "x.safetensors"):
                partial = small / f".{out.name}.tensorfs-partial"
                words = (source, out) + (("-o", "layout=shards=2") if out.suffix == "" else ())
                self.kill(*words, once=lambda partial=partial: (partial / "journal").exists() and "range" in (partial / "journal").read_text())
                if not partial.exists():
                    continue
                filler = small / "filler"
                with open(filler, "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(small).free)
                outcome = tensorfs("consolidate", *words)
                if outcome.code:
                    self.assert_one_line(outcome)
                    self.assertIn(f"{partial} keeps what is written", outcome.stderr)
                    filler.unlink()
                    self.assertGreater(self.finish(*words)["reused"], 0)
                else:
                    filler.unlink()
                self.assertEqual(os.listdir(small), [out.name])
                shutil.rmtree(out) if out.is_dir() else out.unlink()
