"""Every checkpoint that a genuine library wrote, read through a mount by the genuine safetensors package."""

import json

import oracle
from manifest import GOOD, by_id
from mounts import Mount, TestCase, tensorfs
from reading import genuine_summary, summary


class GoodFixtures(TestCase):
    """One test per fixture and claim; `for_each_fixture` makes them."""

    def read_by_the_genuine_package(self, entry):
        with Mount(entry.source, *entry.options) as m:
            for backend in ("mmap", "pread"):
                with self.subTest(backend=backend):
                    self.assertEqual(genuine_summary(m.path / entry.shown, backend), summary(entry.tensors))
            self.check_weight_map(entry, m.path)

    def check_weight_map(self, entry, folder):
        """The map, if there is one, names the file shown for every tensor, and no shard is shown beside it."""
        path = folder / (entry.weight_map or "model.safetensors.index.json")
        if path.exists():
            shown = json.loads(path.read_text())
            self.assertEqual(shown["weight_map"], dict.fromkeys(entry.tensors, entry.shown))
            self.assertIsInstance(shown["metadata"], dict)
        for other in folder.glob("*-of-*.safetensors"):
            self.fail(f"{other.name} is shown beside {entry.shown}")

    def equal_the_oracle(self, entry):
        expected = oracle.sha256(entry.whole_file())
        for _ in range(2):
            with Mount(entry.source, *entry.options) as m:
                data = (m.path / entry.shown).read_bytes()
            self.assertEqual(oracle.read_header(data), oracle.read_header(entry.whole_file()))
            self.assertEqual(oracle.sha256(data), expected)

    def agree_in_ls_and_inspect(self, entry):
        with Mount(entry.source, *entry.options) as m:
            data = (m.path / entry.shown).read_bytes()
        for command in ("ls", "inspect"):
            options = [word for option in entry.options for word in ("-o", option)]
            outcome = tensorfs(command, entry.source, *options, "--json")
            self.assert_done(outcome)
            found = next(s for s in outcome.json()["sets"] if s["name"] == entry.shown)
            self.check_listing(found, data)
            if command == "inspect":
                self.check_pieces(found, oracle.read_header(data))

    def check_listing(self, found, data):
        header = oracle.read_header(data)
        listed = {t["name"]: {k: t[k] for k in ("dtype", "shape", "data_offsets")} for t in found["tensors"]}
        described = {
            name: {k: entry[k] for k in ("dtype", "shape", "data_offsets")} for name, entry in header.tensors.items()
        }
        self.assertEqual(listed, described)
        self.assertEqual(found["metadata"], header.metadata)
        self.assertEqual(found["size"], len(data))
        self.assertEqual(found["bytes"], len(data) - header.data_start)

    def check_pieces(self, found, header):
        for tensor in found["tensors"]:
            start, end = tensor["data_offsets"]
            self.assertEqual(tensor["bytes"], end - start)
            self.assertEqual(tensor["file_offset"], header.data_start + start)
            length = 0
            for piece in tensor["pieces"]:
                own = piece["runs"] * piece["run_bytes"]
                length += own
                # A tensorizer file may have the shape only, and a pickle strides.
                if piece["range"] is not None and piece["strides"] is None:
                    self.assertEqual(own, piece["range"][1] - piece["range"][0])
                self.assertIn(piece["shard"], found["shards"])
            self.assertEqual(length, tensor["bytes"])

    def verify(self, entry):
        options = [word for option in entry.options for word in ("-o", option)]
        outcome = tensorfs("verify", entry.source, *options, "--json")
        self.assert_done(outcome)
        report = outcome.json()
        self.assertTrue(report["ok"])
        found = next(s for s in report["sets"] if s["name"] == entry.shown)
        self.assertEqual((found["ok"], found["class"], found["error"]), (True, None, None))
        self.assertEqual(found["tensors"], len(entry.tensors))
        # Whole tensors that DCP wrote, with a weight map: may be read as either form.
        tails = {"proven", "unproven"} if entry.id == "dcp_whole_files" else {"proven"}
        self.assertIn(found["tail"], {entry.fields.get("tail", "unproven")} if entry.kind == "dcp" else tails)


def for_each_fixture():
    claims = {
        "reads_through_the_mount_as_the_manifest_says": GoodFixtures.read_by_the_genuine_package,
        "is_shown_byte_for_byte_as_the_oracle_builds_it": GoodFixtures.equal_the_oracle,
        "is_listed_as_its_header_says": GoodFixtures.agree_in_ls_and_inspect,
        "is_verified": GoodFixtures.verify,
    }
    for entry in GOOD:
        for claim, check in claims.items():
            setattr(GoodFixtures, f"test_{entry.id}_{claim}", lambda self, e=entry, c=check: c(self, e))


for_each_fixture()


class HubCache(TestCase):
    def test_a_hub_cache_mounted_as_a_tree_shows_the_snapshot_as_one_file(self):
        entry = by_id("hf_cache")
        cache = entry.source.parents[2]
        with Mount(cache) as m:
            folder = m.path / entry.source.relative_to(cache)
            self.assertEqual(genuine_summary(folder / entry.shown, "mmap"), summary(entry.tensors))

    def test_one_repository_of_a_hub_cache_mounts_too(self):
        entry = by_id("hf_cache")
        with Mount(entry.source.parents[1]) as m:
            folder = m.path / "snapshots" / entry.source.name
            self.assertEqual(genuine_summary(folder / entry.shown, "mmap"), summary(entry.tensors))

    def test_two_variants_in_one_folder_are_two_files(self):
        source = by_id("hf_gpt2_variant_fp16").source
        with Mount(source) as m:
            weights = sorted(p.name for p in m.path.glob("*.safetensors"))
        self.assertEqual(weights, ["model.fp16.safetensors", "model.safetensors"])

    def test_sharded_and_consolidated_files_of_one_checkpoint_are_shown_once(self):
        with Mount(by_id("dcp_with_consolidated").source) as m:
            weights = sorted(str(p.relative_to(m.path)) for p in m.path.rglob("*.safetensors"))
        self.assertEqual(weights, ["model.safetensors"])
