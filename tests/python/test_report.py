"""`tensorfs report`: one page with the places of all tensors, safe whatever their names are."""

import html.parser
import json
import re
import shutil
import subprocess
import unittest
from urllib.parse import quote

import numpy as np

import checkpoints
import oracle
from manifest import GOOD, by_id
from mounts import BIN, Mount, TestCase, run_measured, tensorfs, visible_files

HOSTILE = [
    "</script><script>document.title='broken'</script>", "<img src=x onerror=\"document.title='broken'\">", "a\n\u202eb",
    "__proto__.x", "constructor", "--> <!--", "\u2028", "@SCRIPT@", "a.b", "a.b.c", "", ".", "&lt;b&gt;",
]
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page(html.parser.HTMLParser):
    """The elements of a page and the data in it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.data, self.inside = [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag == "script" and dict(attributes).get("type") == "application/json"

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.data += data


def numbers_of(one):
    """The columns of a set, row by row: name -> dtype, shape, file, offset, bytes and pieces."""
    rows = {}
    for t, name in enumerate(one["names"]):
        pieces = range(one["first"][t], one["first"][t + 1])
        rows[name] = {
            "dtype": one["dtypes"][one["dtype"][t]],
            "shape": one["shapes"][one["shape"][t]],
            "file": one["files"][one["file"][t]]["name"],
            "offset": one["offset"][t],
            "bytes": one["bytes"][t],
            "pieces": [
                (one["shards"][one["pieceShard"][p]]["name"], one["pieceStart"][p], one["pieceEnd"][p]) for p in pieces
            ],
        }
    return rows


class ReportCase(TestCase):
    def report(self, source, *words):
        path = self.tmp / f"{len(visible_files(self.tmp))}.html"
        self.assert_done(tensorfs("report", source, "--html", path, *words))
        return path

    def data_of(self, path):
        page = Page(path.read_text())
        # Nothing is loaded from elsewhere, and no name adds an element.
        self.assertEqual([tag for tag, _ in page.tags].count("script"), 2)
        self.assertFalse([a for _, a in page.tags if "src" in a or "href" in a])
        self.assertNotIn("img", [tag for tag, _ in page.tags])
        policy = next(a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
        self.assertIn("default-src 'none'", policy)
        return json.loads(page.data)

    def hostile(self):
        folder = self.tmp / "hostile"
        folder.mkdir()
        rows = [(name, "U8", [1000 + n], bytes(1000 + n)) for n, name in enumerate(HOSTILE)]
        checkpoints.write_shard(folder / "model.safetensors", rows)
        return folder

    def large(self):
        """60,000 tensors that are all holes."""
        folder = self.tmp / "large"
        folder.mkdir()
        header, end = {}, 0
        for number in range(60_000):
            name = f"model.layers.{number // 1250}.mlp.experts.{number % 1250 // 3}.{'gud'[number % 3]}.weight"
            header[name] = {"dtype": "BF16", "shape": [1024, 512], "data_offsets": [end, end + (1 << 20)]}
            end += 1 << 20
        text = json.dumps(header).encode()
        with open(folder / "model.safetensors", "wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
        return folder

class Report(ReportCase):
    """The data in the page."""

    def test_the_page_has_every_tensor_of_every_fixture_where_it_lies(self):
        for entry in GOOD:
            words = [word for option in entry.options for word in ("-o", option)]
            with self.subTest(entry.id):
                data = self.data_of(self.report(entry.source, *words))
                one = next(s for s in data["sets"] if s["name"] == entry.shown)
                header = oracle.read_header(entry.whole_file())
                rows = numbers_of(one)
                self.assertEqual(set(rows), set(header.tensors))
                for name, row in rows.items():
                    start, end = header.tensors[name]["data_offsets"]
                    self.assertEqual((row["dtype"], row["shape"]),
                                     (header.tensors[name]["dtype"], header.tensors[name]["shape"]))
                    self.assertEqual(row["bytes"], end - start)
                    # Zeros that no file holds have no place there, and strides have others between them.
                    if entry.id in ("torch_zip_views", "torch_legacy_views"):
                        continue
                    lengths = {row["bytes"], 0} if entry.id == "tz_meta" else {row["bytes"]}
                    self.assertIn(sum(end - start for _, start, end in row["pieces"]), lengths)

    def test_the_map_leads_from_the_file_of_the_mount_to_the_bytes_of_the_shards(self):
        source = checkpoints.hf_set(self.tmp / "src")
        one = self.data_of(self.report(source))["sets"][0]
        with Mount(source) as m:
            shown = (m.path / "model.safetensors").read_bytes()
        self.assertEqual(one["files"][0]["size"], len(shown))
        for name, row in numbers_of(one).items():
            for shard, start, end in row["pieces"]:
                stored = (source / shard).read_bytes()[start:end]
                self.assert_same(shown[row["offset"]:row["offset"] + row["bytes"]], stored, name)

    def test_columns_of_a_tensor_end_with_their_last_row(self):
        folder = self.tmp / "columns"
        folder.mkdir()
        checkpoints.write_shard(folder / "model.safetensors", [("w", "U8", [10, 100], bytes(1000))])
        rules = self.tmp / "rules.toml"
        rules.write_text("[[split]]\nfrom = 'w'\nto = ['a', 'b']\ndim = 1\nsizes = [30, 70]\n")
        data_start = oracle.read_header((folder / "model.safetensors").read_bytes()).data_start
        rows = numbers_of(self.data_of(self.report(folder, "-o", f"rename={rules}"))["sets"][0])
        name = "model.safetensors"
        self.assertEqual(rows["a"]["pieces"], [(name, data_start, data_start + 930)])
        self.assertEqual(rows["b"]["pieces"], [(name, data_start + 30, data_start + 1000)])
        inspected = tensorfs("inspect", folder, "-o", f"rename={rules}", "--json").json()["sets"][0]
        for tensor, shape in zip(inspected["tensors"], ([10, 30], [10, 70]), strict=True):
            (piece,) = tensor["pieces"]
            self.assertEqual((piece["shape"], piece["strides"]), (shape, [100, 1]))
            self.assertEqual((piece["runs"], piece["run_bytes"]), (10, shape[1]))
        text = tensorfs("inspect", folder, "-o", f"rename={rules}").stdout
        self.assertIn("box [10, 30] at [0, 0] with strides [100, 1], 10 runs of 30 bytes", text)

    def test_duplicates_are_told_once_checksums_are_recorded(self):
        folder = self.tmp / "double"
        folder.mkdir()
        rng = np.random.default_rng(1)
        same = rng.bytes(5000)
        rows = [("a", "U8", [5000], same), ("b", "U8", [5000], rng.bytes(5000)), ("c", "F32", [1250], same)]
        checkpoints.write_shard(folder / "model.safetensors", rows)
        one = self.data_of(self.report(folder))["sets"][0]
        self.assertEqual((one["recorded"], one["duplicates"]), (False, []))
        self.assert_done(tensorfs("verify", folder))
        one = self.data_of(self.report(folder))["sets"][0]
        self.assertTrue(one["recorded"])
        self.assertEqual([[one["names"][t] for t in group] for group in one["duplicates"]], [["a", "c"]])

    def test_a_view_is_compared_with_what_is_stored(self):
        source = checkpoints.hf_set(self.tmp / "src")
        self.assertIsNone(self.data_of(self.report(source))["sets"][0]["changes"])
        data = self.data_of(self.report(source, "-o", "layout=original"))
        self.assertEqual((data["options"], data["sets"][0]["changes"]), (["layout=original"], []))
        self.assertEqual(len(data["sets"][0]["files"]), 3)

    def test_names_of_tensors_cannot_break_out_of_the_page(self):
        data = self.data_of(self.report(self.hostile()))
        self.assertEqual(sorted(data["sets"][0]["names"]), sorted(HOSTILE))

    def test_only_an_earlier_report_is_replaced_without_being_told(self):
        source = checkpoints.hf_set(self.tmp / "src")
        out = self.tmp / "out.html"
        out.write_text("<!doctype html><p>mine")
        self.assert_refused(tensorfs("report", source, "--html", out))
        self.assertEqual(out.read_text(), "<!doctype html><p>mine")
        for words in (("--force",), ()):
            self.assert_done(tensorfs("report", source, "--html", out, *words))
        self.assert_refused(tensorfs("report", source, "--html", self.tmp))
        self.assert_refused(tensorfs("report", source, "--html", self.tmp / "none/out.html"))
        self.assertEqual(tensorfs("report", source).code, 2)
        self.assert_refused(tensorfs("report", by_id("bad_dcp_hole_middle").source, "--html", self.tmp / "bad.html"))
        self.assertFalse((self.tmp / "bad.html").exists())

    def test_no_file_of_the_source_is_replaced(self):
        source = checkpoints.hf_set(self.tmp / "src")
        (source / "config.json").write_text("{}")
        before = {path.name: path.read_bytes() for path in source.iterdir()}
        shard = next(source.glob("*.safetensors"))
        link = self.tmp / "link.html"
        link.symlink_to(shard)
        for root, targets in ((source, [link, *source.iterdir()]), (shard, [link, *source.glob("*.safetensors*")])):
            for target in targets:
                with self.subTest(source=root.name, target=target.name):
                    outcome = tensorfs("report", root, "--html", target, "--force")
                    self.assert_refused(outcome)
                    self.assert_one_line(outcome)
                    self.assertIn(f"{target}: is a file of the source; write somewhere else", outcome.stderr)
        self.assertEqual({path.name: path.read_bytes() for path in source.iterdir()}, before)
        # An earlier report may lie there.
        for _ in range(2):
            self.assert_done(tensorfs("report", source, "--html", source / "report.html"))

    # The files without a weights suffix were replaced.
    def test_no_file_of_a_source_without_a_suffix_is_replaced(self):
        whole = checkpoints.hf_set(self.tmp / "src", 1)
        snapshot = checkpoints.hub_cache(self.tmp / "models--a--b", whole)
        link = next(snapshot.glob("*.safetensors"))
        blob = link.resolve()
        mapping = self.tmp / "rules.toml"
        mapping.write_text("[[rename]]\nregex = 'weight'\nto = 'w'\n")
        (blob.parent / "config.json").write_text("{}")
        key = self.tmp / "key"
        key.write_bytes(bytes(32))
        before = {path: path.read_bytes() for path in (blob, blob.parent / "config.json", mapping, key)}
        rename = ("-o", f"rename={mapping}")
        for target, words, said in (
            (blob, (), "is a file of the source"), (link, (), "is a file of the source"),
            (blob.parent / "config.json", (), "is a file of the source"),
            (mapping, rename, "is a file that an option names"), (key, ("-o", f"reference={key}"), "is a file that an option names"),
        ):
            with self.subTest(target=target.name):
                outcome = tensorfs("report", blob, "--html", target, "--force", *words)
                self.assert_refused(outcome)
                self.assert_one_line(outcome)
                self.assertIn(f"{target}: {said}", outcome.stderr)
        self.assertEqual({path: path.read_bytes() for path in before}, before)
        self.assertTrue(link.is_symlink())

    def test_no_file_behind_a_mount_is_replaced(self):
        source = checkpoints.numbered_set(self.tmp / "src", 1)
        before = {path.name: path.read_bytes() for path in source.iterdir()}
        with Mount(source, "include=t1") as m:
            for path in source.iterdir():
                outcome = tensorfs("report", m.path, "--html", path, "--force", "-o", "dtype=f32")
                self.assert_refused(outcome)
                self.assertIn(f"{path}: is a file of the source", outcome.stderr)
        self.assertEqual({path.name: path.read_bytes() for path in source.iterdir()}, before)

    def test_sixty_thousand_tensors_make_a_page_of_a_few_megabytes(self):
        path = self.tmp / "large.html"
        outcome, peak = run_measured(BIN, "report", self.large(), "--html", path)
        self.assert_done(outcome)
        self.assertLess(path.stat().st_size, 12 << 20)
        self.assertLess(peak, 400 << 20)
        self.assertEqual(len(self.data_of(path)["sets"][0]["names"]), 60_000)


@unittest.skipUnless(BROWSER, "needs chromium")
class InABrowser(ReportCase):
    """The page as a browser draws it."""

    def drawn(self, path, fragment=""):
        """The elements of the page after its scripts have run."""
        words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.tmp}/browser"]
        done = subprocess.run(
            [*words, "--virtual-time-budget=20000", "--dump-dom", f"file://{path}{fragment}"],
            capture_output=True, text=True, timeout=100,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def assert_drawn(self, dom):
        root = re.search(r"<html[^>]*>", dom)[0]
        self.assertIn("data-ready", root)
        self.assertNotIn("data-failed", root)

    def test_names_of_tensors_cannot_break_out_of_the_page(self):
        dom = self.drawn(self.report(self.hostile()), "#search=" + quote("<"))
        self.assert_drawn(dom)
        self.assertNotIn("broken</title>", dom)
        self.assertNotIn("<img", dom)
        self.assertIn("&lt;img src=x onerror=", dom)

    def test_sixty_thousand_tensors_are_drawn_and_searched(self):
        dom = self.drawn(self.report(self.large()), "#search=layers.7.mlp.experts.41")
        self.assert_drawn(dom)
        found = re.search(r'id="found">(\d+) tensors', dom)
        # Expert 41 and those that begin with these digits, three tensors each but for the last one.
        self.assertEqual(int(found[1]), 3 + 6 * 3 + 2)

    def test_pages_of_sets_of_each_kind_are_drawn(self):
        for name in ("hf_three_shards", "dcp_grid_2d", "bt_one"):
            with self.subTest(name):
                self.assert_drawn(self.drawn(self.report(by_id(name).source)))
