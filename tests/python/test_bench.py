"""`tensorfs bench`: that it runs, refuses what it should, and cleans up. Its measurements decide nothing here."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import unittest

from mounts import BIN, FIXTURES, TestCase, daemon_of, detach, mount_table, process_gone, run, wait_until

CASES = "read,read4,direct,mmap,mmap-shuffled,mmap-sorted,random4k,source-cached,reread,mmap:warm,mmap-sorted:warm"


class Bench(TestCase):
    def setUp(self):
        super().setUp()
        self.temporary = self.tmp / "tmp"
        self.temporary.mkdir()
        self.env = {**os.environ, "TMPDIR": str(self.temporary)}
        self.source = self.copy(FIXTURES / "hf/gpt2_tiny")

    def bench(self, *args):
        # Never by drop-caches, which slows down everything else on the machine.
        return run(BIN, "bench", *args, "--evict=fadvise", "--dir", self.temporary, env=self.env, timeout=120)

    def assert_nothing_left(self):
        self.assertEqual(list(self.temporary.iterdir()), [])
        self.assertEqual([m.path for m in mount_table() if m.path.startswith(f"{self.tmp}/")], [])

    def test_every_case_has_runs_on_both_sides_and_their_figures(self):
        outcome = self.bench(self.source, "--json", "--runs=2", f"--cases={CASES}", "-o", "passthrough=never")
        self.assert_done(outcome)
        found = outcome.json()
        self.assertTrue(found["ok"])
        self.assertEqual(found["evict"]["method"], "fadvise")
        self.assertEqual(found["mount"]["options"], ["passthrough=never"])
        self.assertEqual(found["source"]["shards"], 3)
        self.assertGreater(found["machine"]["cores"], 0)
        self.assertEqual([case["case"] for case in found["cases"]], CASES.split(","))
        for case in found["cases"]:
            with self.subTest(case["case"]):
                if case["case"] == "direct" and case["skipped"]:
                    continue
                self.assertIsNone(case["failed"])
                order = [(one["round"], one["side"]) for one in case["runs"]]
                self.assertEqual(order, [(0, "mount"), (0, "file"), (1, "file"), (1, "mount")])
                self.assertEqual(len({(one["bytes"], one["digest"]) for one in case["runs"]}), 1)
                for figure in ("gb_per_s", "reader_cpu_s_per_gb"):
                    self.assertEqual(set(case["mount"][figure]), {"median", "min", "max", "mad"})
                self.assertGreater(case["ratio_of_medians"], 0)
                self.assertGreater(case["ratio_of_pairs"]["median"], 0)
                self.assertGreaterEqual(case["daemon_cpu_s_per_gb"]["min"], 0)
                self.assertGreater(case["daemon_peak_bytes"], 1 << 20)
        self.assert_nothing_left()

    def test_the_threads_of_the_daemon_and_its_reading_ahead_are_told_with_each_case(self):
        outcome = self.bench(
            "--make=hf", "--size=8M", "--json", "--runs=2", "--cases=read,random4k", "-o", "passthrough=never"
        )
        self.assert_done(outcome)
        read, random = outcome.json()["cases"]
        for case in (read, random):
            threads = {one["name"]: one for one in case["daemon_threads"]}
            self.assertTrue(threads["cache"]["once"], threads)
            self.assertEqual(set(threads["cache"]["busiest_cpu_s_per_gb"]), {"median", "min", "max", "mad"})
            self.assertIn("fuser", threads)
            for counter in ("prefetched_bytes", "prefetch_used_bytes", "prefetch_wasted_bytes"):
                self.assertGreaterEqual(case["read_ahead"][counter], 0)
            for one in case["runs"]:
                self.assertEqual(bool(one["threads"]), one["side"] == "mount")
        # Each page once, whichever the order.
        self.assertEqual({one["bytes"] for one in random["runs"]}, {random["runs"][0]["bytes"]})
        for side in ("mount", "file"):
            self.assertGreater(random[side]["ops_per_s"]["min"], 0)
            self.assertIsNone(read[side]["ops_per_s"])
        self.assert_nothing_left()

    def test_a_model_is_loaded_by_transformers_where_it_is_there_and_skipped_with_a_reason_where_not(self):
        outcome = self.bench(self.source, "--json", "--runs=1", "--cases=from-pretrained")
        self.assert_done(outcome)
        (case,) = outcome.json()["cases"]
        if case["skipped"]:
            self.assertRegex(case["skipped"], "transformers|config.json")
        else:
            self.assertEqual({one["bytes"] for one in case["runs"]}, {case["runs"][0]["bytes"]})
            self.assertGreater(case["runs"][0]["bytes"], 0)
        (self.source / "config.json").unlink(missing_ok=True)
        outcome = self.bench(self.source, "--json", "--runs=1", "--cases=from-pretrained")
        self.assert_done(outcome)
        self.assertEqual(outcome.json()["cases"][0]["skipped"], "no config.json beside the shards")
        self.assert_nothing_left()

    def test_load_by_numpy_reads_what_numpy_has_no_type_for(self):
        outcome = self.bench("--make=dcp-columns", "--size=2M", "--json", "--runs=1", "--cases=load")
        self.assert_done(outcome)
        (case,) = outcome.json()["cases"]
        if not case["skipped"]:
            self.assertEqual({one["bytes"] for one in case["runs"]}, {case["runs"][0]["bytes"]})
            self.assertGreater(case["runs"][0]["bytes"], 1_500_000)
        self.assert_nothing_left()

    def test_a_made_checkpoint_of_each_kind_is_measured_and_kept_if_asked(self):
        for made, kind in (("hf", "weight_map"), ("dcp-columns", "dcp"), ("dcp-rows", "dcp")):
            with self.subTest(made):
                outcome = self.bench(f"--make={made}", "--size=2M", "--runs=1", "--cases=read", "--keep")
                self.assert_done(outcome)
                self.assertIn(f"({kind}, ", outcome.stdout)
                self.assertRegex(outcome.stdout, r"(?m)^read +\d")
                (file,) = self.temporary.glob("*/consolidated.safetensors")
                (config,) = self.temporary.glob("*/config.json")
                against = self.bench(config.parent, "--against", file, "--runs=1", "--cases=mmap")
                self.assert_done(against)
                self.assertTrue(file.exists())
                for folder in (file.parent, config.parent):
                    shutil.rmtree(folder)
                self.assert_nothing_left()

    def test_a_file_with_other_bytes_is_refused(self):
        other = self.tmp / "other.safetensors"
        other.write_bytes(b"not these")
        outcome = self.bench(self.source, "--against", other)
        self.assert_refused(outcome)
        self.assertIn("other.safetensors: not what the mount shows", outcome.stderr)
        self.assertTrue(other.exists())
        self.assert_nothing_left()

    def test_a_file_to_measure_against_that_cannot_be_read_is_named(self):
        for file, why in ((self.tmp / "missing", "No such file"), (self.tmp, "not a regular file")):
            outcome = self.bench(self.source, "--against", file)
            self.assert_refused(outcome)
            self.assertIn(f"--against {file}: {why}", outcome.stderr)
            self.assert_nothing_left()

    def test_what_makes_no_sense_is_a_usage_error(self):
        for args in (
            [],
            [self.source, "--make=hf"],
            [self.source, "--cases=reads"],
            [self.source, "--runs=0"],
            [self.source, "-o", "layout=original"],
            ["--make=hf", "--size=4X"],
        ):
            with self.subTest(args=args):
                self.assertEqual(self.bench(*args).code, 2)
        refused = self.bench(FIXTURES / "bad/dcp/hole_middle", "--json")
        self.assert_refused(refused)
        self.assertEqual((refused.json()["ok"], refused.json()["class"]), (False, "dcp_hole"))
        self.assert_nothing_left()

    def start(self, *args):
        command = [BIN, "bench", "--make=hf", "--size=4M", "--runs=100000", "--evict=fadvise", *args]
        bench = subprocess.Popen(
            command, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.addCleanup(bench.communicate)
        self.addCleanup(bench.kill)
        return bench

    def daemon(self):
        """The daemon of the bench's mount of the moment, or None. Never looks at the mount itself."""
        ours = [m.path for m in mount_table() if m.path.startswith(f"{self.temporary}/")]
        return daemon_of(ours[0]) if ours else None

    def stopped_daemon(self):
        """The daemon of a mount of the bench, which is stopped from now on, or None."""
        pid = self.daemon()
        # Each run has a mount of its own, and this one may be over.
        with contextlib.suppress(ProcessLookupError):
            if pid:
                os.kill(pid, signal.SIGSTOP)
                return pid
        return None

    def test_ctrl_c_leaves_neither_mount_nor_files(self):
        bench = self.start("--cases=read")
        wait_until(self.daemon, 20, "the bench mounts")
        bench.send_signal(signal.SIGINT)
        self.assertEqual(bench.communicate(timeout=20)[1].strip(), "tensorfs: stopped")
        self.assertEqual(bench.returncode, -signal.SIGINT)
        self.assert_nothing_left()

    def test_a_daemon_that_hangs_is_ended_and_does_not_hold_up_the_bench(self):
        bench = self.start("--cases=read", "--time-limit=2")
        pid = wait_until(self.stopped_daemon, 20, "the bench mounts")
        wait_until(lambda: process_gone(pid), 40, "the bench ends the daemon that hangs")
        # Where no reader waited for it, the bench goes on; else its only case has failed, and it may be over.
        bench.send_signal(signal.SIGINT)
        self.assertIn(bench.wait(30), (-signal.SIGINT, 1))
        self.assert_nothing_left()

    def test_a_second_signal_ends_the_bench_at_once(self):
        bench = self.start("--cases=read")
        pid = wait_until(self.stopped_daemon, 20, "the bench mounts")
        try:
            bench.send_signal(signal.SIGINT)
            # It waits for the daemon.
            with self.assertRaises(subprocess.TimeoutExpired):
                bench.wait(0.3)
            bench.send_signal(signal.SIGTERM)
            self.assertEqual(bench.wait(2), -signal.SIGTERM)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            for mount in mount_table():
                if mount.path.startswith(f"{self.temporary}/"):
                    detach(mount.path)


if __name__ == "__main__":
    unittest.main()
