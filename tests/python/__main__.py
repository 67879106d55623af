"""Runs the suite and ends with one line of counts: `python tests/python [-k PATTERN]... [-f] [-j JOBS]`."""

import argparse
import ctypes
import json
import os
import select
import signal
import struct
import subprocess
import sys
import time
import unittest
from pathlib import Path

NUMBER = struct.Struct("I")
# Most tests wait more than they compute. With more jobs than this, the tests would wait for each other, and some tests
# have deadlines of seconds.
MAX_JOBS = 8
# Modules with few and long tests. They start first, so that none of them runs alone at the end.
LONG = (
    "test_cloud_stores", "test_documentation", "test_encrypted", "test_handover", "test_header_memory", "test_limits",
    "test_process_group", "test_secrets", "test_snapshots", "test_soak", "test_stalled_commands",
    "test_stalled_restart", "test_tree_memory", "test_views_on_mounts",
)
# These are numbers from linux/sched.h and linux/mount.h.
CLONE_NEWNS = 0x20000
MS_REC, MS_PRIVATE = 0x4000, 0x40000


class Result(unittest.TextTestResult):
    """Prints a line for each test, with its duration if it was long."""

    passed = 0

    def addSuccess(self, test):
        self.passed += 1
        super().addSuccess(test)

    def startTest(self, test):
        self._start = time.monotonic()
        super().startTest(test)

    def stopTest(self, test):
        seconds = time.monotonic() - self._start
        if seconds > 2:
            self.stream.writeln(f"    ({seconds:.1f} s) {test.id()}")
        super().stopTest(test)

    def getDescription(self, test):
        return test.id()

    def counts(self):
        bad = {subtest_owner(test).id() for test, _ in self.failures + self.errors}
        bad |= {test.id() for test in self.unexpectedSuccesses}
        return {"passed": self.passed, "failed": len(bad), "skipped": len(self.skipped)}


def main(folder=str(Path(__file__).parent), jobs=min(4 * os.cpu_count(), MAX_JOBS)):
    # A shell that starts this program in the background makes it ignore both signals, but tests send them to their
    # children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    options = arguments(folder, jobs)
    loader = unittest.TestLoader()
    if options.k:
        loader.testNamePatterns = [p if "*" in p else f"*{p}*" for p in options.k]
    if options.worker:
        return work(loader.discover(folder), *options.worker)
    if options.jobs > 1 and not options.failfast:
        counts = run_jobs(options)
    else:
        runner = unittest.TextTestRunner(verbosity=2, failfast=options.failfast, resultclass=Result)
        counts = runner.run(loader.discover(folder)).counts()
    print("{passed} passed, {failed} failed, {skipped} skipped".format(**counts), flush=True)
    return 1 if counts["failed"] else 0


def arguments(folder, jobs):
    parser = argparse.ArgumentParser(prog=Path(folder).name)
    parser.add_argument("-k", action="append", default=[], metavar="PATTERN", help="run the tests whose name matches")
    parser.add_argument("-f", "--failfast", action="store_true", help="in order, up to the first failure")
    parser.add_argument("-j", "--jobs", type=int, default=jobs, help="modules of tests at once (default: %(default)s)")
    parser.add_argument("--worker", type=int, nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_jobs(options):
    """Runs several processes of this script, each of which takes one test module after the other. Returns the sum of
    their counts."""
    take, give = os.pipe()
    workers = []
    for _ in range(options.jobs):
        reports, report = os.pipe()
        words = [sys.executable, *sys.argv, "--worker", str(take), str(report)]
        process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[take, report]
        )
        os.close(report)
        workers.append((process, reports))
    os.close(take)
    # The pipe has room for 16,384 numbers. A worker ends when it gets a number that no module has.
    with open(give, "wb") as numbers:
        numbers.write(b"".join(NUMBER.pack(n) for n in range(4096)))
    copy_lines([process.stdout for process, _ in workers])
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    for process, reports in workers:
        with open(reports) as file:
            report = file.read()
        if process.wait() or not report:
            print(f"a process of the suite ended with {process.returncode}")
            report = report or json.dumps({"failed": 1})
        for key, count in json.loads(report).items():
            counts[key] += count
    return counts


def copy_lines(streams):
    """Prints whole lines of several processes, until all have ended."""
    rest = {stream.fileno(): b"" for stream in streams}
    try:
        while rest:
            for fd in select.select(list(rest), [], [])[0]:
                data = os.read(fd, 1 << 16)
                whole, newline, part = (rest.pop(fd) + data).rpartition(b"\n")
                sys.stdout.buffer.write(whole + newline + (b"" if data else part))
                sys.stdout.flush()
                if data:
                    rest[fd] = part
    finally:
        # If the run was interrupted, this shows the test that each process was running.
        sys.stdout.buffer.write(b"".join(part + b"\n" for part in rest.values() if part))


def work(suite, take, report):
    """Runs the test modules whose numbers it takes from the pipe, and reports its counts."""
    modules = {}
    for test in all_tests(suite):
        modules.setdefault(type(test).__module__, unittest.TestSuite()).addTest(test)
    order = sorted(modules, key=lambda name: (name in LONG, modules[name].countTestCases()), reverse=True)
    own_mounts()
    result = unittest.TextTestRunner(verbosity=2, resultclass=Result)._makeResult()
    Taken([modules[name] for name in order], take).run(result)
    result.printErrors()
    with open(report, "w") as file:
        json.dump(result.counts(), file)
    return 0


class Taken(unittest.TestSuite):
    """The modules of `order` whose numbers come out of the pipe `take`. They are one suite, so that each module is set
    up and torn down once."""

    _cleanup = False

    def __init__(self, order, take):
        super().__init__()
        self.order, self.take = order, take

    def __iter__(self):
        while number := os.read(self.take, NUMBER.size):
            (number,) = NUMBER.unpack(number)
            if number >= len(self.order):
                break
            yield self.order[number]


def own_mounts():
    """Moves this process to a mount namespace of its own, if it is allowed to.

    A test that makes a mount namespace copies all mounts into it, and an unmounted mount lives as long as a copy of it.
    So no process may copy the mounts of another process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) == 0 and libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None):
        raise OSError(ctypes.get_errno(), "mounts cannot be made private")


def all_tests(suite):
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from all_tests(test)
        else:
            yield test


def subtest_owner(test):
    return getattr(test, "test_case", test)


if __name__ == "__main__":
    sys.exit(main())
