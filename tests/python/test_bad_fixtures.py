"""Broken checkpoints: each is refused soon, with the right class, a message that names the file and little memory."""

import oracle
from manifest import BAD, by_id
from mounts import BIN, Mount, MountFailed, TestCase, find_mount, run_measured, tensorfs
from reading import raw_summary, summary

SECONDS_MAX = 5
RSS_MAX = 100_000_000
slowest = 0.0
largest = 0


class BadFixtures(TestCase):
    """One test per broken checkpoint; `for_each_fixture` makes them."""

    @classmethod
    def tearDownClass(cls):
        print(f"\nbroken checkpoints: slowest {slowest:.3f} s, largest process {largest / 1e6:.1f} MB", flush=True)

    def refused(self, entry):
        source = entry.build(self.tmp)
        names = entry.names(source)
        verified = self.limited("verify", source, "--json")
        self.check_report(verified, entry)
        self.check_message(verified, names)
        for mode in ([], ["--foreground"]):
            self.check_no_mount(self.limited("mount", source, self.mount_point(), *mode), names)

    def refused_or_right(self, entry):
        source = entry.build(self.tmp)
        self.limited("verify", source, "--json")
        try:
            with Mount(source) as m:
                found = raw_summary(m.path / entry.shown)
        except MountFailed as error:
            self.assertEqual(error.code, 1, error)
            return
        if entry.tensors is not None:
            self.assertEqual(found, summary(entry.tensors))

    def mount_point(self):
        path = self.tmp / "mnt"
        path.mkdir(exist_ok=True)
        return path

    def check_report(self, outcome, entry):
        self.assertEqual(outcome.code, 1, outcome.stderr)
        report = outcome.json()
        self.assertFalse(report["ok"])
        self.assertIn(report["class"], entry.classes, report)
        bad = [s for s in report["sets"] if not s["ok"]]
        self.assertTrue(bad, report)
        self.assertIn(bad[0]["class"], entry.classes)
        self.assertTrue(bad[0]["error"] and "\n" not in bad[0]["error"], report)

    def check_message(self, outcome, names):
        lines = outcome.stderr.splitlines()
        self.assertTrue(
            any(line.startswith("tensorfs: ") and name in line for line in lines for name in names),
            f"none of {sorted(names)} in {outcome.stderr!r}",
        )

    def check_no_mount(self, outcome, names):
        self.assertIsNone(find_mount(self.mount_point()))
        self.assert_refused(outcome)
        self.check_message(outcome, names)

    def limited(self, *words):
        """Runs tensorfs and checks that it neither crashed, nor took long, nor took much memory."""
        global slowest, largest
        outcome, rss = run_measured(BIN, *words)
        slowest, largest = max(slowest, outcome.seconds), max(largest, rss)
        self.assertIn(outcome.code, (0, 1), outcome.stderr)
        self.assertLess(outcome.seconds, SECONDS_MAX)
        self.assertLess(rss, RSS_MAX)
        return outcome


def for_each_fixture():
    for entry in BAD:
        if entry.expect == "error":
            check, claim = BadFixtures.refused, f"is_refused_as_{entry.fields['class']}"
        else:
            check, claim = BadFixtures.refused_or_right, "is_refused_or_read_right"
        setattr(BadFixtures, f"test_{entry.id}_{claim}", lambda self, e=entry, c=check: c(self, e))


for_each_fixture()


class Conflicts(TestCase):
    def test_a_replica_with_other_bytes_is_reported_by_verify(self):
        entry = by_id("bad_dcp_duplicate_conflict")
        outcome = tensorfs("verify", entry.source, "--json")
        self.assertEqual(outcome.code, 1, "verify reads the data and must see that the replicas differ")
        self.assertEqual(outcome.json()["class"], "dcp_overlap")

    def test_a_changed_hub_blob_is_reported_by_verify(self):
        good = by_id("hf_cache")
        cache = self.copy(good.source.parents[2])
        blob = next((cache / "models--org--tiny/snapshots/0123abcd").glob("*-00001-*")).resolve()
        data = bytearray(blob.read_bytes())
        data[-1] ^= 1
        blob.write_bytes(data)
        self.assertNotEqual(oracle.sha256(data), blob.name)
        outcome = tensorfs("verify", cache, "--json")
        self.assert_refused(outcome)
        self.assertEqual(outcome.json()["class"], "hash_mismatch")
