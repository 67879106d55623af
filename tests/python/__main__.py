"""Runs the suite and ends with one line of counts: `python tests/python [-k PATTERN]... [-f]`."""

import argparse
import signal
import sys
import time
import unittest
from pathlib import Path


class Result(unittest.TextTestResult):
    """A line per test with its duration."""

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
            self.stream.writeln(f"    ({seconds:.1f} s)")
        super().stopTest(test)

    def getDescription(self, test):
        return test.id()


def main(folder=str(Path(__file__).parent)):
    # A shell that starts this in the background has it ignored, and tests send it to their children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(prog=Path(folder).name)
    parser.add_argument("-k", action="append", default=[], metavar="PATTERN", help="run the tests whose name matches")
    parser.add_argument("-f", "--failfast", action="store_true", help="stop at the first failure")
    options = parser.parse_args()
    loader = unittest.TestLoader()
    if options.k:
        loader.testNamePatterns = [p if "*" in p else f"*{p}*" for p in options.k]
    suite = loader.discover(folder)
    runner = unittest.TextTestRunner(verbosity=2, failfast=options.failfast, resultclass=Result)
    result = runner.run(suite)
    bad = {subtest_owner(test).id() for test, _ in result.failures + result.errors}
    print(f"{result.passed} passed, {len(bad)} failed, {len(result.skipped)} skipped", flush=True)
    return 0 if result.wasSuccessful() else 1


def subtest_owner(test):
    return getattr(test, "test_case", test)


if __name__ == "__main__":
    sys.exit(main())
