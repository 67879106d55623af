"""Distributed checkpoints of torch: what of them is shown, by which names, and how they change."""

import json
import os
import re
import shutil

import oracle
import torch_files
from manifest import by_id
from mounts import FIXTURES, Mount, TestCase, tensorfs, wait_until

SMALL = FIXTURES / "torch/dcp_small"


class Distributed(TestCase):
    def copied(self, name="small"):
        return self.copy(FIXTURES / f"torch/dcp_{name}", "step")

    def test_the_optimizer_is_left_out_and_a_note_says_so(self):
        outcome = tensorfs("ls", FIXTURES / "torch/dcp_torch22", "--json")
        self.assert_done(outcome)
        (found,) = outcome.json()["sets"]
        self.assertEqual(found["kind"], "distributed")
        self.assertEqual([t["name"] for t in found["tensors"]], sorted(by_id("torch_dcp_torch22").tensors))
        (note,) = outcome.json()["notes"]
        self.assertIn("`optimizer`", note)
        self.assertIn("`list`, `epoch` of the checkpoint are not shown", note)

    def test_its_metadata_or_one_of_its_files_names_the_set(self):
        whole = tensorfs("ls", SMALL, "--json").json()["sets"]
        for name in (".metadata", "__1_0.distcp"):
            outcome = tensorfs("ls", SMALL / name, "--json")
            self.assert_done(outcome)
            self.assertEqual(outcome.json()["sets"], whole)

    def test_a_mount_shows_the_model_and_the_files_beside_it(self):
        step = self.copied()
        (step / "config.json").write_text("{}")
        shutil.copy(FIXTURES / "torch/zip_tied.bin", step / "common.pt")
        with Mount(step) as m:
            self.assertEqual(sorted(p.name for p in m.path.iterdir()), ["common.pt", "config.json", "model.safetensors"])
            self.assertEqual((m.path / "model.safetensors").read_bytes(), oracle.from_distcp(SMALL))

    def test_a_file_of_another_save_is_not_shown_and_named(self):
        step = self.copied()
        shutil.copy(step / "__0_0.distcp", step / "__9_0.distcp")
        outcome = tensorfs("verify", step, "--json")
        self.assert_done(outcome)
        self.assertIn("__9_0.distcp is not of this save by `.metadata` and not shown", json.dumps(outcome.json()["notes"]))
        with Mount(step) as m:
            self.assertEqual([p.name for p in m.path.iterdir()], ["model.safetensors"])

    def test_beside_safetensors_it_is_shown_as_it_is_and_read_if_it_is_named(self):
        step = self.copied()
        whole = oracle.from_distcp(SMALL)
        (step / "other.safetensors").write_bytes(whole)
        with Mount(step) as m:
            self.assertEqual((m.path / ".metadata").read_bytes(), (SMALL / ".metadata").read_bytes())
            self.assertFalse((m.path / "model.safetensors").exists())
        outcome = tensorfs("ls", step / ".metadata", "--json")
        self.assert_done(outcome)
        self.assertEqual(outcome.json()["sets"][0]["name"], "model.safetensors")

    def test_consolidate_and_convert_write_what_a_mount_shows(self):
        entry = by_id("torch_dcp_threads_ws2")
        whole = oracle.from_distcp(entry.source)
        self.assert_done(tensorfs("consolidate", entry.source, self.tmp / "out"))
        self.assert_done(tensorfs("convert", entry.source, self.tmp / "one.safetensors", "--verify"))
        expected = oracle.read_header(whole).tensors
        for path in (self.tmp / "out/model.safetensors", self.tmp / "one.safetensors"):
            found = oracle.tensor_bytes(path)
            self.assertEqual(set(found), set(expected))
            for name, (dtype, shape, data) in found.items():
                known = entry.tensors[name]
                self.assertEqual((dtype, shape, oracle.sha256(data)), (known["dtype"], known["shape"], known["sha256"]))

    def test_a_file_that_ends_before_an_item_by_the_metadata_is_refused_also_where_the_item_is_not_shown(self):
        for name in ("small", "torch22"):
            for path in sorted((FIXTURES / f"torch/dcp_{name}").glob("*.distcp")):
                with self.subTest(f"{name}/{path.name}"):
                    step = self.copied(name)
                    (step / path.name).write_bytes(path.read_bytes()[:-1])
                    outcome = tensorfs("verify", step)
                    self.assert_refused(outcome)
                    self.assertIn(f"step/{path.name}: ", outcome.stderr)
                    self.assertIn(f"{path.stat().st_size - 1} bytes", outcome.stderr)
                    self.assertIn("fetch or copy the file again", outcome.stderr)
                    shutil.rmtree(step)

    def test_a_file_without_shown_tensors_may_be_missing_and_a_note_names_it(self):
        step = self.copied("torch22")
        whole = tensorfs("ls", step, "--json").json()

        def move_optimizer(root):
            data = {path.name: path.read_bytes() for path in step.glob("*.distcp")}
            written = dict.fromkeys([*data, "__7_0.distcp"], b"")
            for index, place in root.state["storage_data"].items():
                values = place.state
                item = data[values["relative_path"]][values["offset"] :][: values["length"]]
                if index.state["fqn"].startswith("optimizer"):
                    values["relative_path"] = "__7_0.distcp"
                values["offset"] = len(written[values["relative_path"]])
                written[values["relative_path"]] += item
            for name, items in written.items():
                (step / name).write_bytes(items)

        path = step / ".metadata"
        path.write_bytes(torch_files.changed(path.read_bytes(), lambda root: None))
        self.assertEqual(tensorfs("ls", step, "--json").json()["sets"], whole["sets"])
        path.write_bytes(torch_files.changed(path.read_bytes(), move_optimizer))
        moved = (step / "__7_0.distcp").read_bytes()
        (step / "__7_0.distcp").unlink()
        outcome = tensorfs("ls", step, "--json")
        self.assert_done(outcome)
        self.assertEqual(outcome.json()["sets"], whole["sets"])
        self.assertIn("`__7_0.distcp` of this save is not here, with none of the shown tensors", outcome.stdout)
        self.assertIn("__7_0.distcp: `.metadata` places", tensorfs("ls", step, "-o", "state=all").stderr)
        # A cut one is refused.
        (step / "__7_0.distcp").write_bytes(moved[:3000])
        self.assert_refused(tensorfs("ls", step))
        (step / "__7_0.distcp").write_bytes(moved + b"more")
        self.assertIn(f"the bytes {len(moved)} to {len(moved) + 4}", tensorfs("ls", step).stderr)
        (step / "__7_0.distcp").write_bytes(moved)
        self.assert_done(tensorfs("ls", step))

    def test_a_file_with_bytes_that_no_item_has_by_the_metadata_is_refused_with_their_place(self):
        item = (SMALL / "__0_0.distcp").read_bytes()[:1577]
        for name, more in (("small", b"junk" * 25), ("small", item), ("torch22", b"\0")):
            for path in sorted((FIXTURES / f"torch/dcp_{name}").glob("*.distcp")):
                with self.subTest(f"{name}/{path.name}"):
                    step = self.copied(name)
                    data = path.read_bytes()
                    (step / path.name).write_bytes(data + more)
                    outcome = tensorfs("ls", step)
                    self.assert_refused(outcome)
                    end = len(data) + len(more)
                    self.assertIn(f"step/{path.name}: has {end} bytes, and no item of `.metadata` has the bytes {len(data)} to {end}", outcome.stderr)
                    self.assertIn("take both from one save, or save again", outcome.stderr)
                    shutil.rmtree(step)

    def test_an_item_that_the_metadata_does_not_name_is_refused_with_its_place(self):
        step = self.copied("torch22")
        gone = []

        def forget(root):
            places = root.state["storage_data"]
            for index in [index for index in places if index.state["fqn"].startswith("optimizer")][:1]:
                gone.append(places.pop(index).state)

        path = step / ".metadata"
        path.write_bytes(torch_files.changed(path.read_bytes(), forget))
        outcome = tensorfs("ls", step)
        self.assert_refused(outcome)
        start, end = gone[0]["offset"], gone[0]["offset"] + gone[0]["length"]
        self.assertIn(f"step/{gone[0]['relative_path']}: has ", outcome.stderr)
        self.assertIn(f"no item of `.metadata` has the bytes {start} to {end}, though", outcome.stderr)

    def test_files_of_another_save_under_the_names_of_this_one_are_refused_as_that(self):
        one, other = FIXTURES / "torch/dcp_small", FIXTURES / "torch/dcp_threads_ws2"
        for source, (name, found) in [(other, ("__0_0.distcp", "__1_0.distcp")), (one, ("__0_0.distcp", "__2_0.distcp"))]:
            with self.subTest(f"{source.name}/{name}"):
                step = self.copy(source, "step")
                shutil.copy(source / found, step / name)
                outcome = tensorfs("ls", step)
                self.assert_refused(outcome)
                self.assertIn(f"step/{name}: tensor `", outcome.stderr)
                self.assertIn("of different saves, the file was exchanged", outcome.stderr)
                shutil.rmtree(step)
        step = self.copied()
        data = (SMALL / "__1_0.distcp").read_bytes()
        (step / "__1_0.distcp").write_bytes(data[1:] + b"\0")
        outcome = tensorfs("verify", step)
        self.assert_refused(outcome)
        self.assertIn("its item is not where `.metadata` places it: the bytes 0 to 1577 of this file are not one archive", outcome.stderr)

    def test_a_metadata_that_takes_more_memory_than_it_may_is_refused_with_the_limit(self):
        step = self.copied()
        # The file has holes and takes no room on the disk.
        os.truncate(step / ".metadata", (1 << 30) + 1)
        outcome = tensorfs("ls", step)
        self.assert_refused(outcome)
        (limit,) = re.findall(r"step/.metadata: has 1073741825 bytes, and at most (\d+) are read with this memory$", outcome.stderr.strip())
        self.assertTrue(64 << 20 <= int(limit) <= 1 << 30, limit)
        if int(limit) < 1 << 30:
            os.truncate(step / ".metadata", 1 << 30)
            self.assertIn("; a machine with 64 GiB reads this one", tensorfs("ls", step).stderr)

    def test_views_cut_and_cast_its_tensors(self):
        with Mount(FIXTURES / "torch/dcp_threads_ws2", "include=[ab]", "dtype=f32") as m:
            found = oracle.tensor_bytes(m.path / "model.safetensors")
        self.assertEqual({name: dtype for name, (dtype, *_) in found.items()}, {"a": "F32", "b": "I64"})

    def test_a_save_appears_under_a_mount_once_its_metadata_is_there(self):
        store = self.tmp / "store"
        (store / "step").mkdir(parents=True)
        with Mount(store, "watch=auto") as m:
            for path in sorted(SMALL.glob("*.distcp")):
                shutil.copy(path, store / "step")
            shown = m.path / "step/model.safetensors"
            self.assertFalse(shown.exists())
            shutil.copy(SMALL / ".metadata", store / "step/.metadata.tmp")
            (store / "step/.metadata.tmp").rename(store / "step/.metadata")
            wait_until(shown.exists, 60, "the checkpoint is shown")
            self.assertEqual(shown.read_bytes(), oracle.from_distcp(SMALL))

    def test_one_part_of_a_checkpoint_that_several_machines_have_saved_is_refused_by_name(self):
        step = self.copied()
        (step / "__2_0.distcp").unlink()
        outcome = tensorfs("mount", step, self.mount_point())
        self.assert_refused(outcome)
        self.assertIn("step/__2_0.distcp: `.metadata` places 2 chunks in this file, which is not there", outcome.stderr)
