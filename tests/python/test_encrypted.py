"""Encrypted tensorizer files: which keys open them, what a mount shows, and that no byte of a changed piece is shown."""

import errno
import json
import os
import shutil
import struct

import checkpoints
import oracle
import secretbox
from manifest import FIXTURES
from mounts import Mount, MountFailed, TestCase, tensorfs, visible_files
from reading import raw_summary, summary
from tensorizer_files import Stored, encrypted_file_of, file_of

KEY = checkpoints.random_bytes(0, 32)
PIECE = 64 << 10
ENTRIES = {entry["id"]: entry for entry in json.loads((FIXTURES / "manifest.json").read_text())["encrypted"]}


def tensors():
    """Tensors in one piece and in several, whose data begins at odd places."""
    return {
        "w": ("F32", [1000, 257], checkpoints.random_bytes(1, 1000 * 257 * 4)),
        "small": ("BF16", [3], checkpoints.random_bytes(2, 6)),
        "none": ("F32", [0, 4], b""),
        "exact": ("U8", [2 * PIECE], checkpoints.random_bytes(3, 2 * PIECE)),
        "last": ("F16", [70_001], checkpoints.random_bytes(4, 140_002)),
    }


class Encrypted(TestCase):
    def setUp(self):
        super().setUp()
        self.key = self.tmp / "key"
        self.key.write_bytes(KEY)
        self.made = tensors()
        self.folder = self.tmp / "src"
        self.folder.mkdir()
        self.file = self.folder / "model.tensors"
        self.write(self.file, KEY)

    def write(self, path, key, piece=PIECE):
        path.write_bytes(encrypted_file_of([Stored.of(name, *made) for name, made in self.made.items()], key, piece))

    def flip(self, name, offset):
        """Changes one bit of the encrypted data of a tensor."""
        listing = tensorfs("inspect", self.file, "-o", f"key-file={self.key}", "--json").json()
        found = next(t for t in listing["sets"][0]["tensors"] if t["name"] == name)
        start = found["pieces"][0]["range"][0]
        with open(self.file, "r+b") as file:
            file.seek(start + offset)
            byte = file.read(1)[0]
            file.seek(start + offset)
            file.write(bytes([byte ^ 0x10]))


class Keys(Encrypted):
    def secret_of(self, entry):
        path = self.tmp / f"{entry['id']}.secret"
        if "key_hex" in entry:
            path.write_text(entry["key_hex"] + "\n")
            return f"key-file={path}"
        path.write_text(entry["password"] + "\n")
        return f"passphrase-file={path}"

    def test_the_files_of_the_package_are_shown_with_their_key_or_passphrase(self):
        for entry in ENTRIES.values():
            source, option = FIXTURES / entry["path"], self.secret_of(entry)
            with self.subTest(entry["id"]):
                with Mount(source, option) as m:
                    self.assertEqual(raw_summary(m.path / f"{source.stem}.safetensors"), summary(entry["tensors"]))
                found = tensorfs("verify", source, "-o", option, "--json")
                self.assert_done(found)
                self.assertEqual(found.json()["sets"][0]["header_hashes_compared"], len(entry["tensors"]))
                wrong = "passphrase-file" if "key_hex" in entry else "key-file"
                other = self.tmp / "other"
                other.write_bytes(b"x" * 32)
                outcome = tensorfs("verify", source, "-o", f"{wrong}={other}", "--json")
                self.assert_refused(outcome)
                expected = "key_required" if "key_hex" in entry else "decrypt_failed"
                self.assertEqual(outcome.json()["class"], expected)

    def test_a_key_comes_from_a_file_a_command_or_the_environment(self):
        hexadecimal = self.tmp / "hex"
        hexadecimal.write_text(KEY.hex() + "\n")
        for option in (f"key-file={self.key}", f"key-file={hexadecimal}", f"key-command=cat {self.key}"):
            with self.subTest(option), Mount(self.folder, option) as m:
                self.assertEqual(oracle.tensor_bytes(m.path / "model.safetensors"), self.made)
        for variable, value in (("KEY_FILE", self.key), ("KEY_COMMAND", f"cat {self.key}")):
            environment = {**os.environ, f"TENSORFS_{variable}": str(value)}
            self.assert_done(tensorfs("verify", self.folder, env=environment))
            # A key of the environment is for all files, and some need none.
            plain = FIXTURES / "tensorizer" / "module.tensors"
            self.assert_done(tensorfs("verify", plain, env=environment))
        both = tensorfs("ls", self.folder, "-o", f"key-file={self.key}", "-o", "key-command=true")
        self.assert_refused(both, code=2)
        self.assert_one_line(both)

    def test_a_wrong_key_no_key_and_a_needless_key_are_refused_in_one_line(self):
        wrong, short, gone = self.tmp / "wrong", self.tmp / "short", self.tmp / "gone"
        wrong.write_bytes(bytes(32))
        short.write_bytes(KEY[1:])
        plain = FIXTURES / "tensorizer" / "module.tensors"
        for source, options, kind, text in (
            (self.file, [], "key_required", "model.tensors: is encrypted; give its key"),
            (self.file, [f"key-file={wrong}"], "decrypt_failed", "cannot be decrypted"),
            (plain, [f"key-file={self.key}"], "not_encrypted", "is not encrypted"),
            (self.file, [f"key-file={short}"], "", "31 bytes were found"),
            (self.file, [f"key-file={gone}"], "", "gone: No such file"),
            (self.file, ["key-command=exit 7"], "", "exit status: 7"),
        ):
            with self.subTest(text):
                words = [word for option in options for word in ("-o", option)]
                outcome = tensorfs("verify", source, *words, "--json")
                self.assert_refused(outcome)
                self.assertIn(text, outcome.stderr)
                if kind:
                    self.assertEqual(outcome.json()["class"], kind)
                with self.assertRaises(MountFailed) as caught, Mount(source, *options):
                    pass
                self.assertIn(text, caught.exception.stderr)
                for command in ("ls", "load"):
                    self.assert_refused(tensorfs(command, source, *words))
                self.assert_refused(tensorfs("consolidate", source, self.tmp / "out", *words))
                self.assertFalse((self.tmp / "out").exists())

    def test_a_wrong_key_is_refused_beside_an_empty_tensor_with_an_encryption_of_no_pieces(self):
        name, (dtype, shape, data) = "w", self.made["w"]
        section, sealed = secretbox.encrypt(KEY, data, PIECE)
        part = struct.pack("<HQ", 2, PIECE) + bytes(24 + 8)
        empty = struct.pack("<QHQ", 2 + 8 + len(part), 1, len(part)) + part
        stored = [
            Stored.of("none", "F32", [0, 4], b"", encryption=empty, encrypted=b""),
            Stored.of(name, dtype, shape, data, encryption=section, encrypted=sealed),
        ]
        self.file.write_bytes(file_of(stored, version=3))
        self.assert_done(tensorfs("verify", self.file, "-o", f"key-file={self.key}"))
        wrong = self.tmp / "wrong"
        wrong.write_bytes(bytes(32))
        for command in ("ls", "inspect", "verify"):
            outcome = tensorfs(command, self.file, "-o", f"key-file={wrong}", "--json")
            self.assert_refused(outcome)
            self.assertIn("decrypt_failed", outcome.stdout)

    def test_a_key_of_the_environment_leaves_a_plain_file_its_index(self):
        plain = self.tmp / "plain.tensors"
        plain.write_bytes(file_of([Stored.of(name, *made) for name, made in self.made.items()]))
        self.assert_done(tensorfs("index", plain))
        for environment in ({}, {"TENSORFS_KEY_FILE": str(self.key)}):
            with Mount(plain, env={**os.environ, **environment}) as m:
                found = tensorfs("status", m.path, "--json").json()[0]["index"]
                self.assertEqual((found["sets_from_index"], found["sets_from_headers"]), (1, 0))

    def test_a_folder_whose_keys_are_derived_for_too_long_says_so(self):
        shutil.copy(FIXTURES / "tensorizer" / "module.tensors", self.tmp / "module.tensors")
        stored = [Stored.of(name, *made) for name, made in self.made.items()]
        # The most work that is done for a file. No machine does it in a second.
        self.file.write_bytes(encrypted_file_of(stored, KEY, derivation=(1 << 18, 64 << 10)))
        passphrase = self.tmp / "passphrase"
        passphrase.write_text("not that of the file")
        with Mount(self.tmp, f"passphrase-file={passphrase}", "io-timeout=1") as m:
            with self.assertRaises(OSError) as caught:
                os.listdir(m.path / "src")
            self.assertEqual(caught.exception.errno, errno.EIO)
            m.wait_for_log("src: the keys of the source have not been derived from the passphrase within 1 seconds")
            self.assertNotIn("has not answered", m.log())
        outcome = tensorfs("verify", "-v", self.file, "-o", f"passphrase-file={passphrase}")
        self.assert_refused(outcome)
        self.assertRegex(outcome.stderr, r"model\.tensors: deriving the key of the file took \d+\.\d s")

    def test_a_huge_header_takes_no_memory_and_is_not_read_without_a_key(self):
        size = 1 << 38
        long = Stored.of("w", "U8", [size // 100 * 99], b"", is_long=True, data_len=size // 100 * 99, hashes=[])
        long.entry_len, long.entry_data = long.data_len, size // 100
        self.file.write_bytes(file_of([long], version=5, flags=3, end=b""))
        os.truncate(self.file, size)
        for options, kind in (([], "key_required"), (["-o", f"key-file={self.key}"], "header_decode")):
            outcome = tensorfs("verify", self.file, *options, "--json")
            self.assert_refused(outcome)
            self.assert_one_line(outcome)
            self.assertEqual(outcome.json()["class"], kind)

    def test_a_daemon_with_a_key_writes_no_core_dump(self):
        with Mount(self.folder, f"key-file={self.key}") as m:
            with open(f"/proc/{m.pid}/limits") as file:
                limit = next(line for line in file if line.startswith("Max core file size")).split()
            self.assertLessEqual({*limit[4:6]}, {"0", "1"})

    def test_a_key_of_the_environment_leaves_plain_weights_their_source(self):
        plain = self.tmp / "plain" / "model.tensors"
        plain.parent.mkdir()
        plain.write_bytes(file_of([Stored.of(name, *made) for name, made in self.made.items()]))
        environment = {**os.environ, "TENSORFS_KEY_FILE": str(self.key)}
        safetensors = shutil.copytree(FIXTURES / "hf" / "three_shards", self.tmp / "top" / "safetensors")
        for source, of_file, of_folder in (
            (plain.parent, True, False), (self.folder, False, False), (safetensors, True, True),
        ):
            (source / "config.json").write_text("{}")
            with Mount(source, env=environment) as m:
                names = {name: "user.tensorfs.source" in os.listxattr(m.path / name) for name in visible_files(m.path)}
                weights = next(name for name in names if name.endswith(".safetensors"))
                self.assertEqual((names[weights], names["config.json"]), (of_file, True))
                self.assertEqual("user.tensorfs.source" in os.listxattr(m.path), of_folder)
        shutil.copytree(self.folder, safetensors / "below")
        with Mount(safetensors.parent, env=environment) as m:
            for folder in (m.path, m.path / "safetensors", m.path / "safetensors" / "below"):
                self.assertNotIn("user.tensorfs.source", os.listxattr(folder))

    def test_a_folder_of_both_kinds_takes_a_key_and_shows_what_it_opens(self):
        shutil.copy(FIXTURES / "tensorizer" / "module.tensors", self.folder)
        self.write(self.folder / "other.tensors", bytes(32))
        for _ in range(2):
            with Mount(self.folder, f"key-file={self.key}") as m:
                names = [name for name in visible_files(m.path) if name.endswith(".safetensors")]
                self.assertEqual(names, ["model.safetensors", "module.safetensors"])
                self.assertIn("decrypt_failed", (m.path / "TENSORFS-ERROR.txt").read_text())
            # The index of the run with the key opens nothing for one without it.
            with Mount(self.folder) as m:
                names = [name for name in visible_files(m.path) if name.endswith(".safetensors")]
                self.assertEqual(names, ["module.safetensors"])

    def test_a_plain_file_in_place_of_one_of_several_encrypted_ones_is_refused(self):
        stored = [Stored.of(name, *made) for name, made in self.made.items()]
        for number, part in enumerate((stored[:2], stored[2:]), 1):
            (self.folder / f"set-0000{number}-of-00002.tensors").write_bytes(encrypted_file_of(part, KEY, PIECE))
        os.remove(self.file)
        self.assert_done(tensorfs("verify", self.folder, "-o", f"key-file={self.key}"))
        (self.folder / "set-00002-of-00002.tensors").write_bytes(file_of(stored[2:]))
        outcome = tensorfs("verify", self.folder, "-o", f"key-file={self.key}", "--json")
        self.assert_refused(outcome)
        refused = outcome.json()["sets"][0]
        self.assertEqual(refused["class"], "not_encrypted")
        self.assertIn("set-00002-of-00002.tensors: is not encrypted, but set-00001-of-00002.tensors", outcome.stderr)

    def test_tensors_without_data_in_an_encrypted_file_are_named(self):
        no_pieces = struct.pack("<QH", 2, 0)
        meta = [Stored.of(name, "F32", [8, 2], b"", encryption=no_pieces, hashes=[]) for name in ("zero", "more")]
        sealed = encrypted_file_of([Stored.of("one", *self.made["small"])], KEY, PIECE)
        section, data = secretbox.encrypt(KEY, self.made["small"][2], PIECE, b"n" * 24)
        one = Stored.of("one", *self.made["small"], encryption=section, encrypted=data)
        self.file.write_bytes(file_of([one, *meta], version=4, flags=1))
        note = "model.safetensors: 2 tensors of encrypted files have no data and are read as zeros"
        with Mount(self.file, f"key-file={self.key}") as m:
            m.wait_for_log(note)
            self.assertEqual(oracle.tensor_bytes(m.path / "model.safetensors")["zero"][2], bytes(64))
        self.file.write_bytes(sealed)
        with Mount(self.file, f"key-file={self.key}") as m:
            self.assertNotIn("have no data", m.log())

    def test_index_says_of_a_file_why_none_is_kept(self):
        for source in (self.file, self.folder):
            outcome = tensorfs("index", source, "-o", f"key-file={self.key}")
            self.assert_refused(outcome)
            self.assertIn("not kept (model.tensors is encrypted)", outcome.stdout)
            self.assertIn("the index is not kept: model.tensors is encrypted", outcome.stderr)
        plain = FIXTURES / "tensorizer" / "module.tensors"
        outcome = tensorfs("index", plain, "-o", f"key-file={self.key}")
        self.assert_refused(outcome)
        self.assertIn("module.tensors: is not encrypted", outcome.stderr)

    def test_no_encrypted_file_behind_a_mount_is_replaced_by_its_plain_bytes(self):
        before = self.file.read_bytes()
        with Mount(self.folder, f"key-file={self.key}") as m:
            for words in (("consolidate",), ("convert", "--to", "safetensors")):
                outcome = tensorfs(words[0], m.path, self.file, *words[1:], "--force")
                self.assertNotEqual(outcome.code, 0, outcome.stdout)
                self.assert_one_line(outcome)
            out = self.tmp / "plain.safetensors"
            self.assert_done(tensorfs("consolidate", m.path, out))
        self.assertEqual(self.file.read_bytes(), before)

    def test_the_key_is_not_shown(self):
        with Mount(self.folder, f"key-file={self.key}") as m:
            (m.path / "model.safetensors").read_bytes()
            shown = tensorfs("status", m.path, "--json").stdout + m.log()
            self.assertNotIn(KEY.hex(), shown)
            attributes = os.listxattr(m.path / "model.safetensors")
            self.assertNotIn("user.tensorfs.source", attributes)
            proc = [f"/proc/{m.pid}/cmdline", f"/proc/{m.pid}/environ", "/proc/self/mountinfo"]
            for path in proc:
                with open(path, "rb") as file:
                    self.assertNotIn(KEY, file.read())
        for folder, _, files in os.walk(os.environ["TENSORFS_INDEX_DIR"]):
            for name in files:
                with open(os.path.join(folder, name), "rb") as file:
                    data = file.read()
                self.assertNotIn(KEY, data)
                self.assertNotIn(self.made["exact"][2][:64], data)


class Shown(Encrypted):
    def setUp(self):
        super().setUp()
        self.option = f"key-file={self.key}"

    def test_reads_of_any_range_and_order_are_those_of_the_plain_tensors(self):
        plain = self.tmp / "plain.tensors"
        plain.write_bytes(file_of([Stored.of(name, *made) for name, made in self.made.items()]))
        with Mount(plain) as m:
            expected = (m.path / "plain.safetensors").read_bytes()
        for piece in (1024, PIECE, 2 << 20):
            self.write(self.file, KEY, piece)
            for options in ([], ["readahead=0", "io=pread", "direct=never"], ["direct=always", "cache=16M"]):
                with self.subTest(piece=piece, options=options), Mount(self.file, self.option, *options) as m:
                    path = m.path / "model.safetensors"
                    with open(path, "rb", buffering=0) as file:
                        for number in range(60):
                            start = number * 7_919_777 % len(expected)
                            length = 1 + number * 104_729 % 300_000
                            file.seek(start)
                            self.assert_same(file.read(length), expected[start : start + length], f"{start} {length}")
                    self.assert_same(path.read_bytes(), expected)

    def test_a_changed_bit_is_an_error_of_its_piece_alone_with_a_line_in_the_log(self):
        expected = {name: data for name, (_, _, data) in self.made.items()}
        self.flip("w", PIECE + 5)
        with Mount(self.file, self.option, "readahead=0") as m:
            path = m.path / "model.safetensors"
            header = oracle.read_header_of(path)

            def place(name):
                return header.data_start + header.tensors[name]["data_offsets"][0]

            with open(path, "rb", buffering=0) as file:
                for start in (PIECE, PIECE + 4096, 2 * PIECE - 8192):
                    page = (place("w") + start + 4095) // 4096 * 4096
                    with self.assertRaises(OSError) as caught:
                        os.pread(file.fileno(), 4096, page)
                    self.assertEqual(caught.exception.errno, errno.EIO)
                for name in ("small", "exact", "last"):
                    file.seek(place(name))
                    self.assert_same(file.read(len(expected[name])), expected[name], name)
            m.wait_for_log("tensor `w`")
            self.assertIn("cannot be decrypted", m.log())
        outcome = tensorfs("verify", self.file, "-o", self.option, "--json")
        self.assert_refused(outcome)
        self.assertEqual(outcome.json()["class"], "decrypt_failed")
        self.assertIn("`w`", outcome.stderr)
        for command in (["load", self.file], ["consolidate", self.file, self.tmp / "out"]):
            outcome = tensorfs(*command, "-o", self.option)
            self.assert_refused(outcome)
            self.assertIn("cannot be decrypted", outcome.stderr)
        self.assertFalse((self.tmp / "out").exists())

    def test_views_casts_and_copies_are_those_of_the_plain_file(self):
        plain = self.tmp / "plain" / "model.tensors"
        plain.parent.mkdir()
        plain.write_bytes(file_of([Stored.of(name, *made) for name, made in self.made.items()]))
        for options in (["dtype=bf16"], ["include=w"], ["layout=shards=2"], ["format=bintensors"]):
            with Mount(plain.parent, *options) as a, Mount(self.folder, self.option, *options) as b:
                self.assertEqual(visible_files(a.path), visible_files(b.path))
                for name in visible_files(a.path):
                    self.assert_same((b.path / name).read_bytes(), (a.path / name).read_bytes(), name)
        for command in (["consolidate"], ["convert", "--to", "safetensors"]):
            out = self.tmp / f"out_{command[0]}"
            out.mkdir()
            words = [command[0], self.file, out, *command[1:], "-o", self.option]
            self.assert_done(tensorfs(*words))
            written = next(path for path in out.rglob("*.safetensors"))
            self.assertEqual(oracle.tensor_bytes(written), self.made)
        self.assert_done(tensorfs("load", self.file, "-o", self.option))

    def test_the_stored_file_is_shown_as_it_is_and_no_copy_is_assembled(self):
        with Mount(self.folder, self.option, "layout=original") as m:
            self.assert_same((m.path / "model.tensors").read_bytes(), self.file.read_bytes())
        copies = self.tmp / "copies"
        copies.mkdir(mode=0o700)
        with Mount(self.folder, self.option, f"assemble={copies}") as m:
            for _ in range(5):
                self.assertEqual(oracle.tensor_bytes(m.path / "model.safetensors"), self.made)
            for path in copies.rglob("*"):
                if path.is_file():
                    self.assertNotIn(self.made["exact"][2][:64], path.read_bytes())

    def test_equal_tensors_are_no_difference_with_another_nonce_or_no_encryption(self):
        plain, other = self.tmp / "plain.tensors", self.tmp / "other.tensors"
        plain.write_bytes(file_of([Stored.of(name, *made) for name, made in self.made.items()]))
        self.write(other, KEY, 1024)
        copy = shutil.copytree(self.folder, self.tmp / "copy") / "model.tensors"
        for path in (copy, other, self.file):
            self.assert_done(tensorfs("verify", path, "-o", self.option))
        self.assert_done(tensorfs("verify", plain))
        pipe = self.tmp / "count"
        command = f"key-command=echo >>{pipe}; cat {self.key}"
        for first, second in ((self.file, copy), (self.file, other), (plain, self.file), (self.file, plain)):
            with self.subTest(first=first, second=second):
                pipe.write_text("")
                self.assert_done(tensorfs("diff", first, second, "-o", command))
                self.assertEqual(pipe.read_text(), "\n", "the command runs once")
        self.flip("w", 5)
        self.assert_refused(tensorfs("diff", copy, self.file, "-o", self.option), code=2)

    def test_commands_print_a_failed_read_once(self):
        self.flip("w", 5)
        option = ("-o", f"key-file={self.key}")
        for command in (("load", self.file), ("convert", self.file, self.tmp / "o.tensors"), ("verify", self.file)):
            with self.subTest(command[0]):
                outcome = tensorfs(*command, *option)
                self.assert_refused(outcome)
                self.assertEqual(outcome.stderr.count("cannot be decrypted"), 1, outcome.stderr)
                self.assertNotIn("ERROR", outcome.stderr)

    def test_verify_read_names_the_file_without_checksums(self):
        with self.assertRaises(MountFailed) as caught, Mount(self.file, self.option, "verify=read"):
            pass
        self.assertIn(f"run `tensorfs verify {self.file}` with the same options first", caught.exception.stderr)

    def test_checksums_are_those_of_the_stored_bytes(self):
        for _ in range(2):
            self.assert_done(tensorfs("verify", self.file, "-o", self.option))
        with Mount(self.file, self.option, "verify=read") as m:
            self.assertEqual(oracle.tensor_bytes(m.path / "model.safetensors"), self.made)
