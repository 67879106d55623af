"""`layout=`: a checkpoint as several files, by size, by number, or by a list."""

import json
import os
import random
import shutil
import threading

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

import checkpoints
import oracle
import views
from manifest import by_id
from mounts import Mount, TestCase, find_mount, tensorfs

MAP = views.MAP
REFUSED = "TENSORFS-ERROR.txt"


def sources(tmp):
    yield checkpoints.hf_set(tmp / "hf", n_shards=4)
    yield checkpoints.grid_2d(tmp / "grid")
    yield checkpoints.uneven(tmp / "uneven")


class Layouts(TestCase):
    def assert_shows(self, source, option, expected):
        with Mount(source, option) as m:
            found = views.shown(m.path)
            self.assertEqual(sorted(found), sorted(expected))
            for name, data in expected.items():
                if name.endswith(".json"):
                    self.assertEqual(json.loads(found[name]), json.loads(data))
                else:
                    self.assert_same(found[name], data, name)
                    with safe_open(m.path / name, "np") as file:
                        self.assertEqual(set(file.keys()), set(oracle.read_header(data).tensors))

    def test_files_by_size_are_those_that_the_hub_makes(self):
        for source in sources(self.tmp):
            tensors, metadata = oracle.tensors_of(source)
            ordered = views.in_disk_order(tensors)
            total = sum(len(tensor.data) for tensor in tensors)
            for limit in (1, total // 7, total // 3, total - 1, total):
                groups = views.split_by_size(ordered, limit)
                expected = views.folder_of(list(enumerate(groups, 1)), len(groups), metadata)
                if len(groups) == 1:
                    # One file is shown as with layout=single, with the weight map that it has there.
                    with Mount(source) as m:
                        expected = views.shown(m.path)
                with self.subTest(source=source.name, limit=limit):
                    self.assert_shows(source, f"layout=shards={limit}B", expected)

    def test_files_by_number_hold_consecutive_tensors_and_the_largest_is_small(self):
        for source in sources(self.tmp):
            tensors, metadata = oracle.tensors_of(source)
            ordered = views.in_disk_order(tensors)
            for count in sorted({2, max(2, len(ordered) - 1), len(ordered)}):
                with self.subTest(source=source.name, count=count), Mount(source, f"layout=shards={count}") as m:
                    weight_map = json.loads((m.path / MAP).read_text())["weight_map"]
                    numbers = [int(weight_map[tensor.name].split("-")[1]) for tensor in ordered]
                    self.assertEqual(numbers, sorted(numbers))
                    self.assertEqual(set(numbers), set(range(1, count + 1)))
                    groups = [(n, [t for t, at in zip(ordered, numbers) if at == n]) for n in range(1, count + 1)]
                    expected = views.folder_of(groups, count, metadata)
                    found = views.shown(m.path)
                    self.assertEqual(sorted(found), sorted(expected))
                    for name in expected.keys() - {MAP}:
                        self.assert_same(found[name], expected[name], name)

    def test_a_list_decides_as_the_mapping_of_torch_and_nemo(self):
        rng = random.Random(7)
        for source in sources(self.tmp):
            tensors, metadata = oracle.tensors_of(source)
            # A number without tensors gives no file.
            numbers = {tensor.name: rng.choice([1, 2, 4]) for tensor in tensors}
            numbers[tensors[0].name] = 5
            mapping = self.tmp / f"{source.name}.json"
            mapping.write_text(json.dumps(numbers))
            groups = [(n, [t for t in tensors if numbers[t.name] == n]) for n in sorted(set(numbers.values()))]
            expected = views.folder_of(groups, 5, metadata, map_metadata={})
            with self.subTest(source.name):
                self.assert_shows(source, f"layout=map={mapping}", expected)

    def test_one_file_by_number_has_a_weight_map_and_is_a_checkpoint(self):
        # Shards without a weight map.
        source = checkpoints.numbered_set(self.tmp / "bare", 3, with_map=False)
        tensors, metadata = oracle.tensors_of(source)
        mapping, out = self.tmp / "mapping.json", self.tmp / "out"
        for number in (1, 2):
            mapping.write_text(json.dumps({tensor.name: number for tensor in tensors}))
            expected = views.folder_of([(number, tensors)], number, metadata, map_metadata={})
            self.assert_shows(source, f"layout=map={mapping}", expected)
            self.assert_done(tensorfs("consolidate", source, out, "-o", f"layout=map={mapping}"))
            self.assert_done(tensorfs("diff", source, out))
            shutil.rmtree(out)

    def test_torchs_own_consolidation_has_the_same_files_and_tensors(self):
        entry = by_id("dcp_row_wise")
        mapping = self.tmp / "mapping.json"
        mapping.write_text(json.dumps(dict.fromkeys(entry.tensors, 1)))
        with Mount(entry.source, f"layout=map={mapping}") as m:
            expected = entry.source.parent / entry.source.name
            names = sorted(path.name for path in m.path.iterdir())
            self.assertEqual(names, ["model-00001-of-00001.safetensors", MAP], expected)
            found = oracle.tensor_bytes(m.path / names[0])
            self.assertEqual({name: oracle.sha256(data) for name, (*_, data) in found.items()},
                             {name: fact["sha256"] for name, fact in entry.tensors.items()})

    def test_one_file_can_become_several(self):
        whole = self.tmp / "one"
        whole.mkdir()
        data = [(f"t{n}", "U8", [1000], checkpoints.random_bytes(n, 1000)) for n in range(6)]
        checkpoints.write_shard(whole / "model.safetensors", data)
        with Mount(whole, "layout=shards=3") as m:
            self.assertEqual(sorted(path.name for path in m.path.iterdir()),
                             [checkpoints.shard_name(n, 3) for n in (1, 2, 3)] + [MAP])
            found = {}
            for number in (1, 2, 3):
                found.update(load_file(m.path / checkpoints.shard_name(number, 3)))
            self.assertEqual({name: value.tobytes() for name, value in found.items()}, {n: d for n, _, _, d in data})

    def test_random_reads_by_many_threads_get_the_bytes_of_each_file(self):
        source = checkpoints.grid_2d(self.tmp / "grid")
        with Mount(source, "layout=shards=2") as m:
            tensors, metadata = oracle.tensors_of(source)
            groups = [(n, [t]) for n, t in enumerate(views.in_disk_order(tensors), 1)]
            expected = views.folder_of(groups, 2, metadata)
            wrong = []

            def reads(seed):
                rng = random.Random(seed)
                for _ in range(30):
                    name = checkpoints.shard_name(rng.choice([1, 2]), 2)
                    start = rng.randrange(len(expected[name]))
                    with open(m.path / name, "rb", buffering=0) as file:
                        file.seek(start)
                        data = file.read(rng.choice([1, 4097, 300_000]))
                    if data != expected[name][start : start + len(data)] or not data:
                        wrong.append((name, start))

            threads = [threading.Thread(target=reads, args=(seed,)) for seed in range(8)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            self.assertEqual(wrong, [])

    def test_a_second_start_from_the_index_shows_the_same_files(self):
        source = checkpoints.grid_2d(self.tmp / "grid")
        index = f"index-dir={self.tmp / 'index'}"
        for options in (("layout=shards=2",), (), ("layout=shards=2",)):
            with Mount(source, index, *options) as m:
                found = views.shown(m.path)
                again = found if options else again
        self.assertEqual(sorted(again), [checkpoints.shard_name(n, 2) for n in (1, 2)] + [MAP])
        tensors, metadata = oracle.tensors_of(source)
        groups = [(n, [t]) for n, t in enumerate(views.in_disk_order(tensors), 1)]
        for name, data in views.folder_of(groups, 2, metadata).items():
            if name != MAP:
                self.assert_same(again[name], data, name)

    def test_checksums_guard_each_file(self):
        source = checkpoints.grid_2d(self.tmp / "grid")
        index = f"--index-dir={self.tmp / 'index'}"
        self.assert_done(tensorfs("verify", source, index))
        shard = next(source.iterdir())
        with Mount(source, f"index-dir={self.tmp / 'index'}", "verify=read", "layout=shards=2") as m:
            found = views.shown(m.path)
        self.assertEqual(len(found), 3, shard)


class Refusals(TestCase):
    """Views that no mount takes."""

    def refused(self, source, option):
        at = self.mount_point()
        outcome = tensorfs("mount", source, at, "-o", option)
        try:
            self.assert_refused(outcome, outcome.code)
            self.assert_one_line(outcome)
            self.assertIsNone(find_mount(at))
        finally:
            at.rmdir()
        return outcome


class Refused(Refusals):
    def test_words_that_are_no_layout_are_usage_errors(self):
        source = checkpoints.grid_2d(self.tmp / "grid")
        for word in ("double", "shards", "shards=0", "shards=5XB", "map", "map=", "shards=1.5GB", "shards=-1"):
            outcome = self.refused(source, f"layout={word}")
            self.assertEqual(outcome.code, 2, outcome.stderr)
            self.assertIn("layout", outcome.stderr)

    def test_files_that_are_no_list_are_named_in_one_line(self):
        source = checkpoints.grid_2d(self.tmp / "grid")
        mapping = self.tmp / "map.json"
        for text, said in (
            ("", "JSON"), ("[]", "JSON"), ("{}", "no tensor"), ('{"a": 0}', "a"), ('{"a": "x"}', "found \"x\""),
            ('{"a": 1, "a": 1}', "a"), ('{"a": 1.5}', "1.5"),
        ):
            mapping.write_text(text)
            outcome = self.refused(source, f"layout=map={mapping}")
            self.assertIn(str(mapping), outcome.stderr)
            self.assertIn(said, outcome.stderr)
        for path in (self.tmp / "none.json", self.tmp):
            self.assertIn(str(path), self.refused(source, f"layout=map={path}").stderr)

    def test_an_error_in_a_list_names_no_other_layout(self):
        source = checkpoints.grid_2d(self.tmp / "grid")
        mapping = self.tmp / "map.json"
        mapping.write_text("[]")
        for path in (mapping, self.tmp):
            self.assertNotIn("hub", self.refused(source, f"layout=map={path}").stderr)
        self.assertIn("or hub", self.refused(source, "layout=maps").stderr)

    # It was refused as several files.
    def test_one_file_of_shards_may_have_any_format(self):
        source = checkpoints.grid_2d(self.tmp / "grid")
        found = {}
        for name, options in (("one", "format=bintensors"), ("same", "format=bintensors,layout=shards=1")):
            out = self.tmp / f"{name}.bt"
            self.assert_done(tensorfs("consolidate", source, out, "-o", options))
            with Mount(source, options) as m:
                found[name] = (out.read_bytes(), (m.path / "model.bt").read_bytes())
                self.assertEqual([file for file in os.listdir(m.path) if file.startswith("model")], ["model.bt"])
        self.assertEqual(found["one"], found["same"])

    def test_numbered_files_that_would_be_no_checkpoint_are_refused(self):
        source = checkpoints.grid_2d(self.tmp / "grid")
        gap, whole = self.tmp / "gap.json", self.tmp / "whole.json"
        gap.write_text('{"a": 1, "b": 3}')
        whole.write_text('{"a": 1, "b": 2}')
        tree = self.tmp / "out"
        cases = [
            (f"format=bintensors,{layout}", f"option format=bintensors: {layout} makes numbered files")
            for layout in ("layout=shards=2", "layout=shards=100B", f"layout=map={whole}")
        ]
        cases += [(f"weight-map=hide,layout=map={gap}", f"option weight-map=hide: layout=map={gap} has no file 2,")]
        for option, said in cases:
            with self.subTest(option):
                commands = [("consolidate", source, tree), ("ls", source), ("convert", source, self.tmp / "x.bt", "--to", "bintensors")]
                outcomes = [self.refused(source, option), *(tensorfs(*words, "-o", option) for words in commands)]
                for outcome in outcomes:
                    self.assert_refused(outcome, 2)
                    self.assert_one_line(outcome)
                    self.assertIn(said, outcome.stderr)
        self.assertEqual(sorted(os.listdir(self.tmp)), ["gap.json", "grid", "whole.json"])
        for option in (f"weight-map=hide,layout=map={whole}", f"layout=map={gap}", "format=bintensors,layout=single"):
            self.assert_done(tensorfs("consolidate", source, tree, "-o", option))
            self.assert_done(tensorfs("diff", source, tree))
            shutil.rmtree(tree)

    def test_a_list_that_misses_tensors_or_names_others_is_refused_with_the_tensor(self):
        source = checkpoints.grid_2d(self.tmp / "grid")
        mapping = self.tmp / "map.json"
        for numbers, tensor in (({"a": 1}, "b"), ({"a": 1, "b": 2, "c.d": 1}, "c.d")):
            mapping.write_text(json.dumps(numbers))
            outcome = self.refused(source, f"layout=map={mapping}")
            self.assertEqual(outcome.code, 1)
            self.assertIn(str(mapping), outcome.stderr)
            self.assertIn(tensor, outcome.stderr)

    def test_more_files_than_tensors_are_refused_with_both_numbers(self):
        outcome = self.refused(checkpoints.grid_2d(self.tmp / "grid"), "layout=shards=3")
        self.assertRegex(outcome.stderr, "shards=3 .*has 2")

    def test_a_view_that_fits_one_model_of_a_tree_only_leaves_that_one(self):
        tree = self.tmp / "tree"
        checkpoints.grid_2d(tree / "two")
        checkpoints.hf_set(tree / "many")
        with Mount(tree, "layout=shards=5") as m:
            self.assertIn("shards=5", (m.path / "two" / REFUSED).read_text())
            names = [path.name for path in (m.path / "many").iterdir() if path.suffix == ".safetensors"]
            self.assertEqual(len(names), 5)
            rows = np.concatenate([load_file(m.path / "many" / name).get("layers.1.scalar", np.array([])).ravel()
                                   for name in names])
            self.assertEqual(rows.tolist(), [1.0])
