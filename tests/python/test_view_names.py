"""`include=`, `exclude=` and `rename=`: a checkpoint with some of its tensors, or with other names."""

import fnmatch
import json
import os
import random
import re

from safetensors import safe_open

import checkpoints
import oracle
import views
from mounts import Mount, TestCase, tensorfs
from test_view_layouts import Refusals

FILE = "model.safetensors"


def named(tensors, rules):
    """The tensors under the names that `rules` give: pairs of a function that matches, and one that renames."""
    for tensor in tensors:
        rename = next((rename for matches, rename in rules if matches(tensor.name)), str)
        tensor.name = rename(tensor.name)
    return tensors


def toml(rules):
    text = "".join(f"[[rename]]\n{kind} = '{what}'\nto = '{to}'\n\n" for kind, what, to in rules)
    return "# rules\n" + text


class Names(TestCase):
    def sources(self):
        yield checkpoints.hf_set(self.tmp / "hf", n_shards=3)
        yield checkpoints.uneven(self.tmp / "uneven")

    def assert_shows(self, source, options, tensors, metadata):
        expected = oracle.write(list(tensors), metadata)
        with Mount(source, *options) as m:
            self.assert_same((m.path / FILE).read_bytes(), expected, options)
            with safe_open(m.path / FILE, "np") as file:
                self.assertEqual(set(file.keys()), {tensor.name for tensor in tensors})
            for path in m.path.glob("*.index.json"):
                weight_map = json.loads(path.read_text())
                self.assertEqual(weight_map["weight_map"], dict.fromkeys(sorted(t.name for t in tensors), FILE))
                self.assertEqual(weight_map["metadata"]["total_size"], sum(len(t.data) for t in tensors))

    def test_globs_choose_tensors_as_a_naive_match_does(self):
        rng = random.Random(3)
        for source in self.sources():
            tensors, metadata = oracle.tensors_of(source)
            names = [tensor.name for tensor in tensors]
            globs = ["*", "l*", "*.[12].*", "*e", "o?e", "*[!2]", *names]
            done = 0
            while done < 6:
                include, exclude = (rng.sample(globs, rng.randrange(3)) for _ in range(2))
                left = [
                    t for t in tensors
                    if (not include or any(fnmatch.fnmatchcase(t.name, glob) for glob in include))
                    and not any(fnmatch.fnmatchcase(t.name, glob) for glob in exclude)
                ]
                used = all(any(fnmatch.fnmatchcase(name, glob) for name in names) for glob in include + exclude)
                if not left or not used or len(left) == len(tensors):
                    continue
                done += 1
                options = [f"include={glob}" for glob in include] + [f"exclude={glob}" for glob in exclude]
                with self.subTest(source=source.name, options=options):
                    self.assert_shows(source, options, left, metadata)

    def test_rules_rename_as_a_naive_substitution_does(self):
        rules = [("from", "layers.1.rows", "first.rows"), ("regex", r"^layers\.(\d+)\.(F\d+)$", r"blk.$1.w_${2}")]
        file = self.tmp / "rules.toml"
        file.write_text(toml(rules))
        source = checkpoints.hf_set(self.tmp / "hf", n_shards=3)
        tensors, metadata = oracle.tensors_of(source)
        pattern = re.compile(rules[1][1])
        expected = named(tensors, [
            (lambda name: name == "layers.1.rows", lambda name: "first.rows"),
            (pattern.search, lambda name: pattern.sub(r"blk.\1.w_\2", name)),
        ])
        self.assert_shows(source, [f"rename={file}"], expected, metadata)

    def test_views_combine_and_the_rules_see_what_is_selected(self):
        file = self.tmp / "rules.toml"
        file.write_text(toml([("regex", r"^layers\.\d\.", "x.${0}")]))
        source = checkpoints.hf_set(self.tmp / "hf", n_shards=3)
        tensors, metadata = oracle.tensors_of(source)
        left = [t for t in tensors if ".2." not in t.name and not t.name.endswith("scalar")]
        expected = named(left, [(lambda name: True, lambda name: f"x.{name}")])
        options = ["exclude=*.2.*", "exclude=*scalar", f"rename={file}"]
        self.assert_shows(source, options, expected, metadata)
        groups = views.split_by_size(views.in_disk_order(expected), 500_000)
        self.assertGreater(len(groups), 1)
        with Mount(source, *options, "layout=shards=500KB") as m:
            found = views.shown(m.path)
            for name, data in views.folder_of(list(enumerate(groups, 1)), len(groups), metadata).items():
                if not name.endswith(".json"):
                    self.assert_same(found[name], data, name)

    def test_one_file_of_a_folder_is_shown_with_the_view(self):
        folder = self.tmp / "one"
        folder.mkdir()
        data = [(f"t{n}", "U8", [100], checkpoints.random_bytes(n, 100)) for n in range(3)]
        checkpoints.write_shard(folder / FILE, data)
        with Mount(folder, "exclude=t1") as m, safe_open(m.path / FILE, "np") as file:
            self.assertEqual(sorted(file.keys()), ["t0", "t2"])
            self.assertEqual(file.get_tensor("t2").tobytes(), data[2][3])

    def test_the_index_keeps_the_checkpoint_and_not_the_view(self):
        source = checkpoints.hf_set(self.tmp / "hf")
        tensors, metadata = oracle.tensors_of(source)
        index = f"index-dir={self.tmp / 'index'}"
        only = [t for t in tensors if t.name.endswith("rows")]
        for options, expected in (([], tensors), (["include=*rows"], only), ([], tensors)):
            self.assert_shows(source, [index, *options], expected, metadata)

    def test_bintensors_files_have_the_view_too(self):
        source = checkpoints.row_wise(self.tmp / "rows")
        tensors, metadata = oracle.tensors_of(source)
        with Mount(source, "include=embed", "format=bintensors") as m:
            copy = self.tmp / "copy.safetensors"
            self.assert_done(tensorfs("convert", m.path / "model.bt", copy, "--to=safetensors"))
        found = oracle.tensor_bytes(copy)
        self.assertEqual({name: data for name, (*_, data) in found.items()},
                         {t.name: t.data for t in tensors if t.name == "embed"})

    def test_two_views_with_one_header_have_different_versions(self):
        folder = self.tmp / "twins"
        folder.mkdir()
        checkpoints.write_shard(folder / FILE, [(name, "U8", [9], name.encode() * 9) for name in ("a", "b", "c")])
        rules = self.tmp / "rules.toml"
        found = {}
        for names in ("ab", "ba"):
            rules.write_text(toml([("from", old, new) for old, new in zip(names, ("x", "y"))]))
            with Mount(folder, "exclude=c", f"rename={rules}") as m:
                version = os.getxattr(m.path / FILE, "user.tensorfs.version")
                found[names] = version, (m.path / FILE).read_bytes()
        first, second = found.values()
        self.assertEqual(len(first[1]), len(second[1]))
        self.assertNotEqual(first[0], second[0])
        self.assertNotEqual(first[1], second[1])

    def test_commands_take_the_same_options(self):
        source = checkpoints.row_wise(self.tmp / "rows")
        tensors, _ = oracle.tensors_of(source)
        file = self.tmp / "rules.toml"
        file.write_text(toml([("from", "norm", "model.norm")]))
        out = self.tmp / "out.safetensors"
        options = ["-o", "exclude=embed", "-o", f"rename={file}"]
        self.assert_done(tensorfs("convert", source, out, "--to=safetensors", *options))
        found = {name: data for name, (*_, data) in oracle.tensor_bytes(out).items()}
        self.assertEqual(found, {{"norm": "model.norm"}.get(t.name, t.name): t.data for t in tensors if t.name != "embed"})
        loaded = tensorfs("load", source, "--json", *options)
        self.assert_done(loaded)
        self.assertEqual((loaded.json()["tensors"], loaded.json()["bytes"]), (2, sum(map(len, found.values()))))
        refused = tensorfs("load", source, "-o", "include=nothing*")
        self.assert_refused(refused)
        self.assert_one_line(refused)

    def test_checksums_are_about_the_shards_whatever_the_view(self):
        source = checkpoints.hf_set(self.tmp / "hf")
        index = f"--index-dir={self.tmp / 'index'}"
        self.assert_done(tensorfs("verify", source, index))
        tensors, metadata = oracle.tensors_of(source)
        only = [t for t in tensors if t.name.endswith("rows")]
        options = [f"index-dir={self.tmp / 'index'}", "verify=read", "include=*rows"]
        self.assert_shows(source, options, only, metadata)
        with Mount(source, *options) as m:
            outcome = tensorfs("verify", m.path, index, "--json")
            self.assert_done(outcome)
            self.assertEqual(outcome.json()["sets"][0]["tensors"], len(tensors))

    def test_two_models_that_look_alike_in_the_view_are_both_shown(self):
        tree = self.tmp / "tree"
        for folder, seed in ((tree, 1), (tree / "sub", 2)):
            folder.mkdir(exist_ok=True)
            data = [("same", "U8", [10], checkpoints.random_bytes(seed, 10)), (f"own{seed}", "U8", [1], b"x")]
            checkpoints.write_shard(folder / FILE, data)
        with Mount(tree, "include=same") as m:
            for folder, seed in ((m.path, 1), (m.path / "sub", 2)):
                with safe_open(folder / FILE, "np") as file:
                    self.assertEqual(file.get_tensor("same").tobytes(), checkpoints.random_bytes(seed, 10))


class Refused(Refusals):
    def test_globs_that_match_nothing_or_leave_nothing_are_refused(self):
        source = checkpoints.row_wise(self.tmp / "rows")
        for option, said in (
            ("include=nothing.*", "`nothing.*` matches none of the 3"),
            ("exclude=nothing", "`nothing` matches none of the 3"),
            ("exclude=*", "none of the 3 tensors"),
            ("include=norm,exclude=n*", "none of the 3 tensors"),
        ):
            outcome = self.refused(source, option)
            self.assertEqual(outcome.code, 1)
            self.assertIn(said, outcome.stderr)
        for option in ("include=", "include=[a", "exclude={a", "rename=", "layout=original,include=norm"):
            self.assertEqual(self.refused(source, option).code, 2)

    def test_rules_that_fit_nothing_or_make_one_name_of_two_are_refused_with_file_rule_and_tensor(self):
        source = checkpoints.row_wise(self.tmp / "rows")
        file = self.tmp / "rules.toml"
        for rules, said in (
            ([("from", "norm", "a"), ("from", "gone", "b")], ("rule 2, from = `gone`", "renames none")),
            ([("regex", "^x", "b")], ("rule 1, regex = `^x`", "renames none")),
            ([("regex", "n..m", "x"), ("from", "norm", "y")], ("rule 1", "renames none")),
            ([("from", "norm", "embed")], ("tensor `embed`", "rule 1, from = `norm`", "by no rule")),
            ([("regex", "^.*$", "one")], ("tensor `one`", "`bytes`", "`embed`", "rule 1")),
            ([("regex", "norm", "$0$0"), ("regex", "^embed(x?)$", "$1")], ("rule 2", "leaves no name", "embed")),
        ):
            file.write_text(toml(rules))
            outcome = self.refused(source, f"rename={file}")
            self.assertEqual(outcome.code, 1)
            for word in (str(file), *said):
                self.assertIn(word, outcome.stderr)

    def test_a_file_that_has_no_rules_is_a_usage_error(self):
        source = checkpoints.row_wise(self.tmp / "rows")
        file = self.tmp / "rules.toml"
        for text, said in (
            ("", "rename"), ("[[rename]]\nfrom = 'a'\n", "line"), ("[[rename]]\nregex = '('\nto = 'x'\n", "rule 1"),
            ("{}", "line 1"), ("[[rename]]\nregex = '(a)'\nto = '$2'\n", "group `2`"),
        ):
            file.write_text(text)
            outcome = self.refused(source, f"rename={file}")
            self.assertEqual(outcome.code, 2, outcome.stderr)
            self.assertIn(str(file), outcome.stderr)
            self.assertIn(said, outcome.stderr)
        file.write_bytes(b"\xff\xfe")
        self.assertIn("UTF-8", self.refused(source, f"rename={file}").stderr)
