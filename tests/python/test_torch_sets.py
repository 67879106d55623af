"""Which files of `torch.save` are one checkpoint: names of ranks, and one file of a set that is named."""

import re
import shutil

import numpy as np

import oracle
import torch_files
from mounts import FIXTURES, Mount, TestCase, tensorfs
from torch_files import Object, Tensor

RANKS = FIXTURES / "torch/rank_fsdp1_sharded_ws4"
NUMBERED = "pytorch_model-0000%d-of-00002.bin"


def write_numbered(folder):
    """Two numbered files of one tensor each."""
    folder.mkdir()
    for number, name in ((1, "a"), (2, "b")):
        torch_files.save(folder / (NUMBERED % number), {name: Tensor(np.arange(4, dtype=np.float32) + number)})


class TorchSets(TestCase):
    def sets(self, source, *options):
        outcome = tensorfs("ls", source, "--json", *options)
        self.assert_done(outcome)
        return outcome.json()["sets"]

    def assert_says(self, outcome, words):
        self.assert_refused(outcome)
        self.assertIn(words, outcome.stderr)

    def renamed(self, name, fixture=RANKS):
        """The files of the ranks of a fixture, as accelerate names them."""
        folder = self.tmp / name.split("_rank")[0]
        folder.mkdir()
        for path in fixture.glob("*.pt"):
            rank = path.stem.rsplit("_", 1)[1]
            shutil.copy(path, folder / name.replace("RANK", rank))
        return folder

    def test_a_model_beside_bare_tensors_is_shown_without_its_key_and_a_note_names_the_others(self):
        weight, number = Tensor(np.arange(4, dtype=np.float32), (2, 2)), Tensor(np.ones(1, np.float32), ())
        path = self.tmp / "last.pt"
        for values, others in [
            ({"state_dict": {"fc.weight": weight}, "best_acc1": number, "optimizer": {}}, "`optimizer`, `best_acc1`"),
            ({"model_state_dict": {"fc.weight": weight}, "optimizer_state_dict": {}, "loss": number}, "`optimizer_state_dict`, `loss`"),
            ({"model": {"fc.weight": weight}, "history": Tensor(np.ones(3, np.float32))}, "`history`"),
        ]:
            torch_files.save(path, values)
            outcome = tensorfs("ls", path, "--json")
            self.assertEqual([t["name"] for t in outcome.json()["sets"][0]["tensors"]], ["fc.weight"])
            self.assertIn(f"{others} of the file are not shown; state=all shows their tensors", outcome.stdout)
            names = {t["name"] for t in self.sets(path, "-o", "state=all")[0]["tensors"]}
            self.assertEqual(names, {next(iter(values)) + ".fc.weight", others.split("`")[-2]})
        # Weights have dotted names.
        torch_files.save(path, {"model": {"fc.weight": weight}, "head.bias": number})
        self.assertEqual({t["name"] for t in self.sets(path)[0]["tensors"]}, {"model.fc.weight", "head.bias"})

    def test_one_named_file_of_a_set_means_the_set_and_no_other_file_is_read(self):
        folder = self.tmp / "numbered"
        write_numbered(folder)
        whole = self.sets(folder)
        self.assertEqual([t["name"] for t in whole[0]["tensors"]], ["a", "b"])
        # Neither of them can be read: a header that is longer than its file, and half of an archive.
        (folder / "other.safetensors").write_bytes(b"\xff" * 64)
        (folder / "other.pt").write_bytes((folder / (NUMBERED % 1)).read_bytes()[:200])
        index = self.tmp / "index"
        for number in (1, 2):
            path = folder / (NUMBERED % number)
            self.assertEqual(self.sets(path, "--index-dir", index), whole)
            with Mount(path, f"index-dir={index}") as m:
                self.assertEqual([entry.name for entry in m.path.iterdir()], ["model.safetensors"])
            # The index of a folder with a refused checkpoint is not kept: that of these two files is.
            (one,) = tensorfs("index", path, "--json", "--index-dir", index).json()["indexes"]
            self.assertEqual(one["state"], "fresh")
        (folder / (NUMBERED % 2)).unlink()
        self.assert_says(tensorfs("ls", folder / (NUMBERED % 1)), "1 of 2 shards found, number 2 is missing")

    def test_one_named_file_of_ranks_means_the_files_of_all_ranks(self):
        whole = self.sets(RANKS)
        self.assertEqual(self.sets(RANKS / "model_world_size_4_rank_2.pt"), whole)

    def test_files_of_ranks_are_known_by_the_names_of_accelerate(self):
        with Mount(RANKS) as m:
            whole = oracle.tensor_bytes(m.path / "model.safetensors")
        for name, output in [
            ("pytorch_model_fsdp_0_rankRANK.bin", "model"), ("pytorch_model_fsdp_rankRANK.bin", "model"),
            ("pytorch_model_fsdp_12_rankRANK.bin", "model_12"),
        ]:
            with self.subTest(name):
                folder = self.renamed(name)
                (one,) = self.sets(folder)
                self.assertEqual((one["name"], one["kind"]), (f"{output}.safetensors", "ranks"))
                out = self.tmp / "out.safetensors"
                self.assert_done(tensorfs("consolidate", folder, out, "--force"))
                self.assertEqual(oracle.tensor_bytes(out), whole)
                self.assertEqual(self.sets(folder / name.replace("RANK", "1")), [one])

    def test_files_of_ranks_that_are_missing_or_exchanged_under_those_names_are_refused(self):
        name = "pytorch_model_fsdp_0_rank%d.bin"
        folder = self.renamed("pytorch_model_fsdp_0_rankRANK.bin")
        first, last = folder / (name % 0), folder / (name % 3)
        kept = last.read_bytes()
        last.unlink()
        self.assert_says(tensorfs("ls", folder), "is of rank 0 of 4 by its tensors, and files of 3 ranks are here")
        last.write_bytes(first.read_bytes())
        self.assert_says(tensorfs("ls", folder), "is of rank 0 of 4 by its tensors, not by its name")
        last.write_bytes(kept)
        (folder / (name % 1)).unlink()
        self.assert_says(tensorfs("ls", folder), "3 of 4 shards found, number 1 is missing")

    def test_files_of_runs_with_other_numbers_of_ranks_are_refused_under_those_names(self):
        folder = self.renamed("pytorch_model_fsdp_0_rankRANK.bin")
        last = folder / "pytorch_model_fsdp_0_rank3.bin"
        # A size behind its key, which the memo of the pickle has by a byte or four.
        size = re.compile(rb"(global_world_size(?:q.|r....)K)\x04", re.S)
        last.write_bytes(size.sub(lambda found: found[1] + bytes([8]), last.read_bytes()))
        self.assert_says(tensorfs("ls", folder), "rank3.bin: is of one of 8 ranks by its tensors, pytorch_model_fsdp_0_rank0.bin of one of 4")

    def test_a_mesh_that_is_a_part_of_another_tells_the_number_of_all_ranks(self):
        folder = self.tmp / "part"
        folder.mkdir()
        with torch_files.modules() as named:
            for rank in range(2):
                part = Tensor(np.full(2, rank, dtype=np.float32))
                root = {"w": torch_files.dtensor(named, part, (4,), rank, 4, 0, axis=2)}
                torch_files.save(folder / f"pytorch_model_fsdp_0_rank{rank}.bin", root)
        self.assert_says(tensorfs("ls", folder), "is of rank 0 of 4 by its tensors, and files of 2 ranks are here")

    def test_local_state_dicts_of_fsdp1_are_refused_in_one_line(self):
        folder = self.tmp / "local"
        folder.mkdir()
        for rank in range(2):
            root = {"0.weight": Tensor(np.arange(3, dtype=np.float32))}
            torch_files.save(folder / f"pytorch_model_fsdp_rank{rank}.bin", root)
        outcome = tensorfs("ls", folder)
        self.assert_says(outcome, "pytorch_model_fsdp_rank0.bin: has no tensor of several ranks")
        self.assertEqual(len(outcome.stderr.splitlines()), 1)

    def test_a_tensor_of_more_than_64_dimensions_is_refused_for_that(self):
        for shape in ((1,) * 65, Object("torch", "Size", args=((1,) * 65,))):
            tensor = Tensor(np.zeros(1, dtype=np.float32), (1,) * 65)
            tensor.shape = shape
            torch_files.save(self.tmp / "deep.pt", {"deep": tensor})
            self.assert_says(tensorfs("ls", self.tmp / "deep.pt"), "tensor `deep`: has more than 64 dimensions")
        torch_files.save(self.tmp / "deep.pt", {"deep": Tensor(np.zeros(1, dtype=np.float32), (1,) * 64)})
        self.assert_done(tensorfs("ls", self.tmp / "deep.pt"))
