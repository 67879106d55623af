"""The forms of the log: text, JSON, and the fields of the journal; and the limit on errors of requests."""

import json
import os
import signal
import sys
import unittest

from checkpoints import hf_set
from faults import FaultFs
from manifest import by_id
from mounts import BIN, HANGS, Mount, TestCase, needs_root, run, tensorfs, wait_until
from services import PATIENCE, ServiceCase, mount_config

FILE = "model.safetensors"
SOURCE = by_id("hf_three_shards").source
# Reads a number of pages and counts the failures.
FAIL = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
failed = 0
for number in range(int(sys.argv[2])):
    try:
        os.pread(fd, 10, 4096 * number + 100_000)
    except OSError:
        failed += 1
print(failed)
"""

# Stands in for the journal, mounts in its namespace, and prints each message as a line of JSON.
JOURNAL = """
import json, os, socket, subprocess, sys
binary, source, place = sys.argv[1:4]
options = sys.argv[4:]
os.makedirs("/run/systemd/journal")
journal = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
journal.bind("/run/systemd/journal/socket")
journal.settimeout(30)
subprocess.run([binary, "mount", source, place, *options], check=True, stderr=subprocess.DEVNULL)
os.remove(source + "/model-00002-of-00003.safetensors")
os.truncate(source + "/model-00001-of-00003.safetensors", 1000)
try:
    open(place + "/model.safetensors", "rb").read()
except OSError:
    pass
while True:
    fields = dict(line.split("=", 1) for line in journal.recv(1 << 20).decode().splitlines())
    print(json.dumps(fields), flush=True)
    if "MODEL" in fields or "OP" in fields:
        break
subprocess.run([binary, "umount", place], check=True)
"""


def in_namespace(*words, **kwargs):
    """Runs words where /run and /var/log are empty folders of their own."""
    setup = 'mount -t tmpfs none /run && mount -t tmpfs none /var/log && exec "$@"'
    return run("unshare", "-m", "sh", "-c", setup, "sh", *words, **kwargs)


class LogCase(TestCase):
    def setUp(self):
        super().setUp()
        self.source = hf_set(self.tmp / "source", megabytes=6)

    def failing(self, *options, count=200):
        """The log of a mount whose source fails `count` reads, and the number of failures."""
        with FaultFs(self.source) as faults, Mount(faults.path, "readahead=0", *options) as m:
            faults.tell("eio", "*.safetensors")
            outcome = run(sys.executable, "-S", "-E", "-c", FAIL, m.path / FILE, count)
            self.assert_done(outcome)
            faults.tell("ok")
            failed = int(outcome.stdout)
            self.assertGreater(failed, 100)
            m.kill(15)
            m.wait_for_exit()
            return m.log(), failed


class Forms(LogCase):
    def test_each_line_of_json_is_an_object_with_the_facts_of_its_request(self):
        log, _ = self.failing("log-format=json")
        lines = [json.loads(line) for line in log.splitlines()]
        for line in lines:
            self.assertLessEqual({"time", "level", "message", "pid"}, set(line))
        (first, *_) = [line for line in lines if line.get("op") == "read"]
        self.assertEqual((first["level"], first["file"], first["model"]), ("error", FILE, "."))
        self.assertTrue(first["mount"].endswith("/mnt"), first)

    def test_people_get_text_without_the_fields_of_machines(self):
        log, _ = self.failing("log-format=human")
        self.assertIn("ERROR", log)
        self.assertNotIn("op=", log)
        self.assertNotIn('"op"', log)

    def test_a_final_error_is_json_too(self):
        outcome = tensorfs("mount", self.tmp / "gone", self.tmp, "--foreground", "--log-format", "json")
        self.assertEqual(outcome.code, 1)
        (line,) = outcome.stderr.splitlines()
        self.assertIn("gone", json.loads(line)["message"])

    def test_the_start_and_the_end_of_a_mount_are_told_at_info(self):
        for end, reason in ((lambda m: m.umount(), "it was unmounted"), (lambda m: m.kill(signal.SIGTERM), "a signal")):
            with Mount(SOURCE, "cache=64M", env={**os.environ, "TENSORFS_LOG": "info"}) as m:
                m.wait_for_log(f"mounted on {m.path}, pid {m.pid}, options cache=64M")
                end(m)
                m.wait_for_exit()
                self.assertIn(f"no longer served on {m.path}, pid {m.pid}: {reason}", m.log())

    @needs_root
    def test_a_folder_that_a_mount_hides_is_told_and_so_is_what_lies_on_top_of_a_mount(self):
        target = self.mount_point()
        (target / "file").touch()
        with Mount(SOURCE, at=target) as m:
            m.wait_for_log(f"{target}: is not empty; the mount hides what is there")
            self.assert_done(run("mount", "-t", "tmpfs", "tmpfs", target))
            outcome = tensorfs("mount", SOURCE, target)
            self.assert_refused(outcome)
            self.assertIn("a tensorfs mount is already there, below a mount of tmpfs", outcome.stderr)
            self.assert_done(run("umount", target))

    def test_a_mount_inside_its_source_is_refused_before_the_source_is_listed(self):
        outcome = tensorfs("mount", "/", self.mount_point(), timeout=HANGS)
        self.assert_refused(outcome)
        self.assertIn("lies inside the source /", outcome.stderr)

    def test_a_format_that_is_not_known_is_a_usage_error_that_lists_the_others(self):
        for words in (("--log-format", "xml"), ("-o", "log-format=xml")):
            outcome = tensorfs("mount", self.source, self.tmp, *words)
            self.assertEqual(outcome.code, 2)
            self.assertIn("journal", outcome.stderr)

    def test_the_journal_and_a_file_exclude_each_other(self):
        outcome = tensorfs("mount", self.source, self.tmp, "-o", f"log-format=journal,log={self.tmp}/log")
        self.assertEqual((outcome.code, len(outcome.stderr.splitlines())), (2, 1))

    def test_a_log_file_is_not_for_everybody(self):
        with Mount(self.source, f"log={self.tmp}/log", background=True):
            self.assertEqual((self.tmp / "log").stat().st_mode & 0o777, 0o640)


class Limit(LogCase):
    def test_errors_of_requests_are_limited_and_counted(self):
        log, failed = self.failing()
        written = [line for line in log.splitlines() if "ERROR" in line]
        self.assertLess(len(written), failed / 2)
        more = [line for line in log.splitlines() if "more errors of requests were not logged" in line]
        self.assertTrue(more, log)

    def test_the_number_comes_after_a_while_without_any_other_line(self):
        with FaultFs(self.source) as faults, Mount(faults.path, "readahead=0") as m:
            faults.tell("eio", "*.safetensors")
            self.assert_done(run(sys.executable, "-S", "-E", "-c", FAIL, m.path / FILE, 200))
            m.wait_for_log("more errors of requests were not logged", seconds=30)
            faults.tell("ok")


@needs_root
class Journal(LogCase):
    def test_the_journal_gets_fields_from_a_mount_in_the_background(self):
        place = self.tmp / "mnt"
        place.mkdir()
        for options in ((), ("--log-format", "journal")):
            with self.subTest(options):
                source = hf_set(self.tmp / f"source-{len(options)}")
                words = [sys.executable, "-S", "-E", "-c", JOURNAL, BIN, source, place, *options]
                outcome = in_namespace(*words, timeout=60)
                self.assert_done(outcome)
                lines = [json.loads(line) for line in outcome.stdout.splitlines()]
                for line in lines:
                    self.assertEqual((line["SYSLOG_IDENTIFIER"], line["TENSORFS_MOUNT"]), ("tensorfs", str(place)))
                    self.assertIn(line["PRIORITY"], "34567")
                    self.assertTrue(line["MESSAGE"])

    def test_without_a_journal_a_mount_that_must_log_there_is_refused_in_one_line(self):
        place = self.tmp / "mnt"
        place.mkdir()
        outcome = in_namespace(BIN, "mount", self.source, place, "--log-format", "journal")
        self.assertEqual((outcome.code, len(outcome.stderr.splitlines())), (1, 1))
        self.assertIn("log-format=journal: /run/systemd/journal/socket", outcome.stderr)


@needs_root
class Service(ServiceCase):
    def test_the_service_and_its_workers_log_in_the_form_of_the_config(self):
        source, target = hf_set(self.tmp / "source"), self.target("a")
        service = self.serve('[service]\nlog-format = "json"\n' + mount_config("a", source, target))
        service.wait_until_ready()
        (target / FILE).read_bytes()
        self.assertEqual(service.stop(), 0)
        lines = [json.loads(line) for line in service.log().splitlines()]
        self.assertGreater(len(lines), 1)

    def test_a_reload_with_another_form_changes_the_lines_of_the_service(self):
        source, target = hf_set(self.tmp / "source"), self.target("a")
        mount = mount_config("a", source, target)
        service = self.serve(mount)
        service.wait_until_ready()
        for count, form in enumerate(("json", "human"), 1):
            service.reload(f'[service]\nlog-format = "{form}"\n' + mount)
            wait_until(lambda count=count: service.log().count("config reloaded") == count, PATIENCE, "the reload")
            line = next(line for line in reversed(service.log().splitlines()) if "config reloaded" in line)
            self.assertEqual(line.startswith("{"), form == "json", line)
        self.assertEqual(service.stop(), 0)

    @unittest.skipIf(os.path.exists("/run/systemd/journal/socket"), "there is a journal")
    def test_a_form_that_a_reload_cannot_have_is_tried_again_at_the_next_one(self):
        mount = mount_config("a", hf_set(self.tmp / "source"), self.target("a"))
        service = self.serve(mount)
        service.wait_until_ready()
        for count in (1, 2):
            service.reload('[service]\nlog-format = "journal"\n' + mount)
            service.wait_for_log("config reloaded", count)
            self.assertEqual(service.log().count("the log keeps its form"), count)
