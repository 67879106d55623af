"""`tensorfs serve`: many mounts, each in a process of its own, that come, fail, change and go without the others."""

import ctypes
import errno
import os
import signal
import time
import unittest
from pathlib import Path

import checkpoints
from faults import FaultFs, Reading
from manifest import by_id
from mounts import BIN, ROOT, Mount, find_mount, needs_root, process_gone, run, tensorfs, wait_until
from services import PATIENCE, Service, ServiceCase, mount_config

FILE = "model.safetensors"
SOURCE = by_id("hf_three_shards").source


class StoppedThreads:
    """Stops the threads of a process one by one, as a debugger does."""

    SEIZE, INTERRUPT, ANY_THREAD = 0x4206, 0x4207, 0x40000000

    def __init__(self, pid, but):
        self.pid = pid
        self.but = but
        self.threads = set()
        self._ptrace = ctypes.CDLL(None, use_errno=True).ptrace
        self._ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def __enter__(self):
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            thread = int(task.name)
            if (task / "comm").read_text().strip() != self.but:
                if self._ptrace(self.SEIZE, thread, None, None):
                    raise unittest.SkipTest(f"no ptrace here: {os.strerror(ctypes.get_errno())}")
                self._ptrace(self.INTERRUPT, thread, None, None)
                self.threads.add(thread)
        return self

    def __exit__(self, *_):
        # Threads that a debugger holds do not end before it has looked.
        if not self.have_ended():
            os.kill(self.pid, signal.SIGKILL)
            wait_until(self.have_ended, PATIENCE, "the threads end")

    def have_ended(self):
        for thread in list(self.threads):
            try:
                found, status = os.waitpid(thread, os.WNOHANG | self.ANY_THREAD)
            except ChildProcessError:
                self.threads.discard(thread)
                continue
            if found and not os.WIFSTOPPED(status):
                self.threads.discard(thread)
        return not self.threads


@needs_root
class Serving(ServiceCase):
    def setUp(self):
        super().setUp()
        self.right = checkpoints.hf_whole(SOURCE)
        self.a, self.b = self.target("a"), self.target("b")

    def two(self, **options):
        return mount_config("a", SOURCE, self.a, **options) + mount_config("b", SOURCE, self.b)

    def assert_serves(self, target):
        self.assert_mounted(target)
        self.assert_same((target / FILE).read_bytes(), self.right, target)

    def test_all_mounts_answer_when_the_service_is_ready_and_are_gone_when_it_stops(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        self.assert_serves(self.a)
        self.assert_serves(self.b)
        self.assertEqual(set(service.workers()), {"a", "b"})
        service.wait_for_status("serving 2 of 2 mounts")
        self.assert_done(tensorfs("status", self.a, self.b))
        workers = service.workers().values()
        self.assertEqual(service.stop(), 0, service.log())
        self.assert_not_mounted(self.a)
        self.assert_not_mounted(self.b)
        self.assertTrue(all(process_gone(pid) for pid in workers))
        self.assertEqual(service.manager.count("STOPPING=1"), 1)

    def test_workers_have_the_name_of_the_program_and_their_probes_are_no_readers(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        for target, worker in ((self.a, service.workers()["a"]), (self.b, service.workers()["b"])):
            self.assertEqual(Path(f"/proc/{worker}/comm").read_text(), "tensorfs\n")
            # The service was ready once a probe had read from the mount.
            heat = tensorfs("heat", target, "--json").json()
            self.assertEqual((heat["readers"], heat["files"]), ([], []))
        self.assert_serves(self.a)
        heat = tensorfs("heat", self.a, "--json").json()
        self.assertEqual((len(heat["readers"]), len(heat["files"])), (1, 1))

    def test_a_mount_that_is_refused_is_named_and_does_not_stop_the_others(self):
        bad = mount_config("bad", self.tmp / "nothing", self.b)
        service = self.serve(mount_config("a", SOURCE, self.a) + bad)
        service.wait_until_ready()
        self.assert_serves(self.a)
        self.assert_not_mounted(self.b)
        service.wait_for_status("serving 1 of 2 mounts; bad failed: ")
        self.assertIn(f"{self.tmp}/nothing", service.manager.status())
        # It is mounted once its source is there.
        (self.tmp / "nothing").symlink_to(SOURCE)
        wait_until(lambda: find_mount(self.b), PATIENCE, "the mount comes")
        service.wait_for_status("serving 2 of 2 mounts")
        self.assert_serves(self.b)

    def test_a_service_without_a_mount_that_works_fails(self):
        service = self.serve(mount_config("a", self.tmp / "nothing", self.a))
        self.assertEqual(service.process.wait(PATIENCE), 1)
        self.assertEqual(service.manager.count("READY=1"), 0)
        self.assertIn("a failed: ", service.manager.status())
        self.assertIn("no mount of ", service.log())

    # The next process ended, because no mount had been handed to it.
    def test_a_service_none_of_whose_mounts_serves_goes_on_over_restarts_and_mounts_once_it_can(self):
        source = self.copy(SOURCE, "source")
        service = self.serve(mount_config("a", source, self.a, "watch=off"))
        service.wait_until_ready()
        self.assert_done(run("umount", "-l", self.a))
        service.wait_for_status("a unmounted")
        source.rename(self.tmp / "away")
        for number in (2, 3):
            service.restart()
            service.wait_until_ready(number)
            service.wait_for_status("serving 0 of 1 mount; a failed: ")
        (self.tmp / "away").rename(source)
        service.wait_for_status("serving 1 of 1")
        self.assert_serves(self.a)

    def test_a_service_without_mounts_waits_for_a_reload(self):
        service = self.serve("# nothing yet\n")
        service.wait_until_ready()
        self.assertIn("no mounts in ", service.manager.status())
        service.reload(self.two())
        service.wait_until_ready(2)
        self.assert_serves(self.b)

    def test_a_killed_worker_comes_back_and_the_others_do_not_notice(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        before = service.workers()
        held = self.open(self.b / FILE)
        os.kill(before["a"], signal.SIGKILL)
        wait_until(lambda: service.workers().get("a") not in (None, before["a"]), PATIENCE, "another worker")
        service.wait_for_status("serving 2 of 2 mounts")
        self.assert_serves(self.a)
        self.assertEqual(service.workers()["b"], before["b"])
        self.assert_same(os.pread(held, len(self.right), 0), self.right)
        self.assertEqual(service.log().count("was killed by SIGKILL"), 1)

    def test_a_stopped_worker_is_killed_and_replaced_and_that_is_said_once(self):
        service = self.serve("[service]\nwatchdog = 3\n" + self.two())
        service.wait_until_ready()
        before = service.workers()
        held = self.open(self.b / FILE)
        os.kill(before["a"], signal.SIGSTOP)
        wait_until(lambda: process_gone(before["a"]), PATIENCE, "the stopped worker is killed")
        wait_until(lambda: "serving 2 of 2" in service.manager.status() and service.workers().get("a"), PATIENCE, "a new one")
        self.assert_serves(self.a)
        self.assert_same(os.pread(held, len(self.right), 0), self.right)
        self.assertEqual(service.workers()["b"], before["b"])
        self.assertEqual(service.log().count("did not answer within 3 s"), 1)
        self.assertEqual(service.log().count(str(before["a"])), 2, service.log())

    def test_a_worker_whose_mount_does_not_answer_is_replaced(self):
        service = self.serve("[service]\nwatchdog = 3\n" + self.two())
        service.wait_until_ready()
        before = service.workers()
        # The thread that answers the supervisor goes on.
        with StoppedThreads(before["a"], but="orders") as stopped:
            wait_until(lambda: stopped.have_ended(), PATIENCE, "the worker is killed")
        service.wait_for_log("did not answer within 3 s")
        wait_until(lambda: service.workers().get("a"), PATIENCE, "a new one")
        service.wait_for_status("serving 2 of 2")
        self.assert_serves(self.a)

    def test_supervisor_and_workers_that_were_stopped_together_go_on(self):
        service = self.serve("[service]\nwatchdog = 2\n" + self.two())
        service.wait_until_ready()
        before = service.workers()
        everybody = [service.process.pid, *before.values()]
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        # Longer than the limit, as a node that is frozen for a snapshot.
        time.sleep(4)
        # The worker that goes on last must not count as silent meanwhile.
        for pid in everybody:
            os.kill(pid, signal.SIGCONT)
        alive = service.manager.count("STATUS=serving 2 of 2 mounts")
        service.reload()
        service.wait_until_ready(2)
        self.assertEqual(service.workers(), before)
        self.assertEqual(service.manager.count("STATUS=serving 2 of 2 mounts"), alive)

    def test_a_reload_changes_the_mounts_that_differ_and_leaves_the_others(self):
        c, d = self.target("c"), self.target("d")
        service = self.serve(self.two() + mount_config("c", SOURCE, c))
        service.wait_until_ready()
        before = service.workers()
        held = {target: self.open(target / FILE) for target in (self.a, self.b, c)}
        service.reload(
            mount_config("d", SOURCE, d) + mount_config("b", SOURCE, self.b, "umask=077") + mount_config("a", SOURCE, self.a)
        )
        service.wait_until_ready(2)
        for target in (self.a, self.b, d):
            self.assert_serves(target)
        self.assert_not_mounted(c)
        after = service.workers()
        self.assertEqual((set(after) >= {"a", "b", "d"}, after["a"]), (True, before["a"]))
        self.assertNotEqual(after["b"], before["b"])
        self.assertEqual(os.stat(self.b / FILE).st_mode & 0o777, 0o400)
        # Open files of mounts that go are served for a while, those of others for ever.
        for target, descriptor in held.items():
            self.assert_same(os.pread(descriptor, len(self.right), 0), self.right, target)
        self.assertEqual(service.manager.count("RELOADING=1"), 1)
        self.assertIn("config reloaded; mounts kept: 1, new: 2, ended: 2", service.log())

    def test_two_mounts_can_swap_their_targets(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        service.reload(mount_config("a", SOURCE, self.b) + mount_config("b", SOURCE, self.a))
        service.wait_until_ready(2)
        service.wait_for_status("serving 2 of 2")
        self.assert_serves(self.a)
        self.assert_serves(self.b)
        self.assertNotIn("already there", service.log())

    def test_a_wrong_config_is_refused_and_the_old_one_goes_on(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        before = service.workers()
        service.reload(self.two() + "[[mount]]\nnam = 'x'\n")
        wrong = f"{service.file}:12: unknown key `mount.nam`; did you mean `name`?"
        service.wait_until_ready(2)
        self.assertIn(wrong, service.log())
        self.assertIn(f"config not reloaded: {wrong}", service.manager.status())
        self.assertEqual(service.workers(), before)
        self.assert_serves(self.a)
        service.file.unlink()
        service.reload()
        service.wait_until_ready(3)
        self.assertIn("No such file", service.manager.status())
        service.reload(self.two())
        service.wait_until_ready(4)
        self.assertEqual(service.manager.status(), "serving 2 of 2 mounts")
        self.assertEqual(service.workers(), before)

    def test_a_mount_that_was_taken_off_stays_off_until_a_reload(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        self.assert_done(tensorfs("umount", self.a))
        service.wait_for_status("a unmounted")
        self.assert_not_mounted(self.a)
        service.reload()
        service.wait_until_ready(2)
        self.assert_serves(self.a)

    def test_a_worker_that_got_a_signal_comes_back(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        before = service.workers()
        os.kill(before["a"], signal.SIGTERM)
        wait_until(lambda: service.workers().get("a") not in (None, before["a"]), PATIENCE, "another worker")
        service.wait_for_status("serving 2 of 2 mounts")
        self.assert_serves(self.a)

    def test_an_upgrade_after_a_restart_keeps_the_mounts(self):
        program = self.copy(BIN, "program")
        service = self.serve(self.two(), binary=program)
        service.wait_until_ready()
        held = self.open(self.a / FILE)
        service.restart()
        service.wait_until_ready(2)
        for times in (3, 4):
            self.copy(BIN, "new").rename(program)
            service.reload()
            service.wait_until_ready(times)
            self.assertEqual(service.manager.status(), "serving 2 of 2 mounts")
            self.assert_same(os.pread(held, len(self.right), 0), self.right)
        self.assert_serves(self.b)

    def test_a_mount_with_copies_goes_on_over_a_restart(self):
        copies = self.tmp / "copies"
        copies.mkdir()
        service = self.serve(mount_config("a", SOURCE, self.a, f"assemble={copies},assemble-size=64M"))
        service.wait_until_ready()
        held = self.open(self.a / FILE)
        service.restart()
        service.wait_until_ready(2)
        self.assertIn("handing over 1 mount\n", service.log())
        self.assert_same(os.pread(held, len(self.right), 0), self.right)
        self.assert_serves(self.a)

    def test_a_killed_supervisor_leaves_no_mount_and_the_next_one_starts(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        workers = service.workers().values()
        service.process.kill()
        for pid in workers:
            wait_until(lambda: process_gone(pid), PATIENCE, "the workers end")
        self.assert_not_mounted(self.a)
        self.assert_not_mounted(self.b)

    def test_dead_mounts_of_a_killed_service_are_cleaned_at_the_next_start_and_nothing_else(self):
        c = self.target("c")
        other = self.enter(Mount(SOURCE))
        with Service(self.tmp, self.two() + mount_config("c", SOURCE, c)) as service:
            service.wait_until_ready()
            pids = [service.process.pid, *service.workers().values()]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            service.process.wait(PATIENCE)
            wait_until(lambda: all(process_gone(pid) for pid in pids), PATIENCE, "all end")
            self.assertRaises(OSError, os.listdir, self.a)
            self.assert_mounted(c)
            # Without `c`: its dead mount is of an earlier config.
            service.manager.close()
            (self.tmp / "notify").unlink()
            with Service(self.tmp, self.two()) as second:
                second.wait_until_ready()
                self.assert_serves(self.a)
                self.assert_serves(self.b)
                wait_until(lambda: find_mount(c) is None, PATIENCE, "the dead mount of an earlier config goes")
                self.assert_same((other.path / FILE).read_bytes(), self.right)

    def test_a_killed_worker_whose_mount_leaves_the_config_leaves_no_dead_mount(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        service.process.send_signal(signal.SIGSTOP)
        os.kill(service.workers()["a"], signal.SIGKILL)
        service.reload(mount_config("b", SOURCE, self.b))
        service.process.send_signal(signal.SIGCONT)
        service.wait_until_ready(2)
        wait_until(lambda: find_mount(self.a) is None, PATIENCE, "the dead mount goes")
        self.assert_serves(self.b)

    def test_a_stop_ends_a_stopped_worker_and_its_mount(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        os.kill(service.workers()["a"], signal.SIGSTOP)
        self.assertEqual(service.stop(), 0, service.log())
        self.assert_not_mounted(self.a)
        self.assert_not_mounted(self.b)

    def test_open_files_are_served_for_a_while_after_a_stop_and_a_second_signal_ends_them(self):
        service = self.serve(self.two())
        service.wait_until_ready()
        held = self.open(self.a / FILE)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: find_mount(self.a) is None, PATIENCE, "unmounted")
        self.assert_same(os.pread(held, 1000, 0), self.right[:1000])
        self.assertIsNone(service.process.poll())
        # Not before its worker waits for the second one.
        service.wait_for_log("files are still open")
        service.process.send_signal(signal.SIGTERM)
        self.assertEqual(service.process.wait(PATIENCE), 0)

    def test_the_target_may_be_a_link(self):
        link = self.tmp / "link"
        link.symlink_to(self.a)
        service = self.serve(mount_config("a", SOURCE, link))
        service.wait_until_ready()
        self.assert_serves(self.a)
        service.reload(mount_config("a", SOURCE, link, "umask=077"))
        service.wait_until_ready(2)
        service.wait_for_status("serving 1 of 1")
        self.assertNotIn("already there", service.log())
        os.kill(service.workers()["a"], signal.SIGKILL)
        service.stop()
        self.assert_not_mounted(self.a)


@needs_root
class Stalls(ServiceCase):
    """Sources that do not answer."""

    def setUp(self):
        super().setUp()
        self.right = checkpoints.hf_whole(SOURCE)
        self.good, self.bad = self.target("good"), self.target("bad")
        self.faults = self.enter(FaultFs(SOURCE))

    def config(self, options="index-dir=none,io-timeout=2", watchdog=30):
        service = f"[service]\nwatchdog = {watchdog}\n"
        return service + mount_config("bad", self.faults.path, self.bad, options) + mount_config("good", SOURCE, self.good)

    def assert_good(self):
        self.assert_same((self.good / FILE).read_bytes(), self.right)

    def test_a_source_that_stalls_at_the_start_does_not_stop_the_others(self):
        self.faults.tell("stall-lookup", "*")
        with self.faults.lifted():
            service = self.serve(self.config())
            wait_until(lambda: find_mount(self.good), PATIENCE, "the other mount")
            self.assert_good()
            self.assertEqual(service.manager.count("READY=1"), 0)
            service.wait_until_ready()
            self.assertIn("no answer within 2 seconds", service.manager.status())
        service.wait_for_status("serving 2 of 2")
        self.assert_same((self.bad / FILE).read_bytes(), self.right)

    def test_ready_waits_for_a_slow_source(self):
        self.faults.tell("delay-lookup", "*", 300)
        service = self.serve(self.config())
        service.wait_until_ready()
        self.assertEqual(service.manager.status(), "serving 2 of 2 mounts")
        self.assert_mounted(self.bad)

    def test_a_source_that_stalls_later_stops_neither_the_others_nor_a_reload_nor_the_end(self):
        service = self.serve(self.config())
        service.wait_until_ready()
        before = service.workers()
        self.faults.tell("stall", "*")
        with self.faults.lifted():
            # Not at the start of the file, which the check of the start has read.
            with Reading(self.bad / FILE, [[len(self.right) // 2, 4096]], "direct") as reading:
                [got] = reading.finished(PATIENCE)
                self.assertEqual(got.errno, errno.EIO)
            self.assert_good()
            service.reload()
            service.wait_until_ready(2)
            self.assertEqual(service.workers(), before)
            self.assertEqual(service.stop(), 0)
            self.assert_not_mounted(self.bad)

    def test_a_worker_that_cannot_be_killed_holds_neither_its_readers_nor_its_successor(self):
        service = self.serve(self.config("index-dir=none,io-timeout=0,io=pread", watchdog=2))
        service.wait_until_ready()
        first = service.workers()["bad"]
        self.faults.tell("stall", "*")
        with self.faults.lifted():
            with Reading(self.bad / FILE, [[len(self.right) // 2, 4096]], "direct") as reading:
                wait_until(lambda: self.faults.parked(), PATIENCE, "the read waits for the source")
                # Its thread waits for the source, so the process stays although it is killed.
                os.kill(first, signal.SIGSTOP)
                [got] = reading.finished(PATIENCE)
                self.assertNotEqual(got.errno, 0)
            self.assert_good()
        service.wait_for_status("serving 2 of 2")
        self.assertNotEqual(service.workers()["bad"], first)
        self.assert_same((self.bad / FILE).read_bytes(), self.right)


class Checks(ServiceCase):
    """`tensorfs serve --check`, and configs that are refused."""

    def check(self, config):
        file = self.tmp / "config.toml"
        file.write_text(config)
        return tensorfs("serve", "--check", "--config", file)

    def test_places_that_a_mount_would_refuse_are_found(self):
        (self.tmp / "models/in").mkdir(parents=True)
        (self.tmp / "srv").mkdir()
        (self.tmp / "link").symlink_to("srv")
        models, srv, link, file = (self.tmp / name for name in ("models", "srv", "link", "file"))
        file.touch()
        for config, why in (
            (mount_config("a", models, models), f"its target {models} lies inside its source {models}"),
            (mount_config("a", "/", srv), f"its target {srv} lies inside its source /"),
            (mount_config("a", models / "in", models), f"its source {models}/in lies on its target {models}"),
            (mount_config("b", models, srv) + mount_config("a", models, link), f"{srv} is the target of mount b too"),
            (mount_config("a", models, file), f"its target {file} is no folder"),
            (mount_config("a", models, srv, f"config={link}"), f"config={link}: lies in the mount {srv}"),
            (mount_config("a", models, srv, f"config={srv}/x.json"), f"config={srv}/x.json: lies in the mount {srv}"),
            (mount_config("a", models, srv, f"config={models}/none"), f"config={models}/none: No such file or directory"),
        ):
            outcome = self.check(config)
            self.assert_refused(outcome, 2)
            self.assertIn(f"mount a: {why}", outcome.stderr)
            self.assert_one_line(outcome)

    def test_the_place_of_a_model_of_the_hub_cache_is_compared_with_the_target(self):
        hub, place = self.tmp / "hub", self.tmp / "hub/models--ORG--NAME"
        snapshot = checkpoints.hub_cache(place, checkpoints.hf_set(self.tmp / "checkpoint", megabytes=1))
        (snapshot / "in").mkdir()
        file = self.tmp / "config.toml"
        file.write_text(mount_config("a", "ORG/NAME", snapshot / "in"))
        outcome = tensorfs("serve", "--check", "--config", file, env={**os.environ, "HF_HUB_CACHE": str(hub)})
        self.assert_refused(outcome, 2)
        self.assertIn(f"mount a: its target {snapshot}/in lies inside its source {snapshot}", outcome.stderr)
        # The cache of the service may have it.
        self.assert_done(tensorfs("serve", "--check", "--config", file, env={**os.environ, "HF_HUB_CACHE": "/nowhere"}))

    def test_a_correct_config_is_told_with_its_mounts(self):
        outcome = self.check(mount_config("a", "/data", "/srv/a") + mount_config("b", "/data", "/srv/b", "cache=1G"))
        self.assert_done(outcome)
        self.assertEqual(outcome.stdout, f"{self.tmp}/config.toml: correct, 2 mounts\n")
        self.assert_done(tensorfs("serve", "--check", "--config", ROOT / "systemd/config.toml.example"))

    def test_a_wrong_config_is_one_line_and_status_2(self):
        for config, line, message in (
            (mount_config("a", "/data", "/srv/a", "cash=1G"), 5, "mount.options: unknown option `cash=1G`"),
            ("[[mount]]\nname = 'a", 2, "not TOML: "),
            ("[servic]\n", 1, "unknown key `servic`; did you mean `service`?"),
            ("\x00", 1, "not TOML: "),
        ):
            with self.subTest(config):
                outcome = self.check(config)
                self.assert_refused(outcome, 2)
                self.assert_one_line(outcome)
                self.assertIn(f"{self.tmp}/config.toml:{line}: {message}", outcome.stderr)

    def test_a_config_that_cannot_be_read_is_one_line_and_status_1(self):
        fifo = self.tmp / "fifo"
        os.mkfifo(fifo)
        binary = self.tmp / "binary"
        binary.write_bytes(b"[service]\n\xff")
        for path in (self.tmp / "nothing", self.tmp, fifo, binary, "/dev/zero"):
            with self.subTest(path):
                outcome = tensorfs("serve", "--config", path)
                self.assert_refused(outcome)
                self.assert_one_line(outcome)
                self.assertIn(f"{path}: ", outcome.stderr)

    @needs_root
    def test_umount_dead_removes_dead_mounts_only(self):
        alive = self.enter(Mount(SOURCE))
        with Mount(SOURCE) as dead:
            dead.kill()
            dead.wait_for_exit()
            self.assert_done(tensorfs("umount", "--dead", alive.path))
            self.assertTrue(alive.mounted())
            self.assertTrue(dead.mounted())
            self.assert_done(tensorfs("umount", "--dead", dead.path))
            self.assertFalse(dead.mounted())
            self.assert_done(tensorfs("umount", "--dead", dead.path))
        self.assertEqual(tensorfs("umount").code, 2)


if __name__ == "__main__":
    unittest.main()
