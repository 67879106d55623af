"""Checkpoints in object stores, by URL. The server is that of `tests/python/test_object_stores.py`."""

import os
import pickle
from pathlib import Path

import numpy as np
import safetensors.numpy

import tensorfs
from object_server import ACCESS_KEY, SECRET_KEY, ObjectServer
from package import FIXTURES, Mount, TestCase, environment, python

URL = "s3://bucket/models/tiny"
OTHER_URL = "s3://settings/models/tiny"

# The parent already has connections and threads when it forks.
IN_A_CHILD = """
import os, sys
from pathlib import Path
import tensorfs

url, fds = sys.argv[1], os.pipe()
names = lambda: [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
tensorfs.load_file(sys.argv[2], framework="np")
assert "tensorfs-remote" not in names(), names()
first = tensorfs.load_file(url, framework="np")
assert "tensorfs-remote" in names(), names()
child = os.fork()
if child == 0:
    again = tensorfs.load_file(url, framework="np")
    same = all((again[name] == tensor).all() for name, tensor in first.items())
    os.write(fds[1], b"same" if same and len(again) == len(first) else b"other")
    os._exit(0)
os.waitpid(child, 0)
print(os.read(fds[0], 10).decode())
"""


class ObjectStores(TestCase):
    def setUp(self):
        super().setUp()
        self.source = FIXTURES / "hf/gpt2_tiny"
        self.server = ObjectServer().start()
        self.addCleanup(self.server.stop)
        self.server.put_folder("bucket", "models/tiny", self.source)
        variables = environment(**self.server.environment(), HOME=str(self.tmp))
        variables.__enter__()
        self.addCleanup(variables.__exit__, None, None, None)
        self.expected = tensorfs.load_file(self.source, framework="np")

    def assert_same(self, tensors):
        self.assertEqual(tensors.keys(), self.expected.keys())
        for name, tensor in self.expected.items():
            np.testing.assert_array_equal(tensors[name], tensor)

    def test_the_first_remote_source_starts_the_threads_for_them_and_a_child_has_its_own(self):
        variables = self.server.environment()
        self.assertEqual(python(IN_A_CHILD, URL, self.source, **variables).strip(), "same")

    def test_a_program_may_set_the_environment_after_a_failed_attempt(self):
        with environment(AWS_ENDPOINT_URL="http://127.0.0.1:9"):
            with self.assertRaises(OSError):
                tensorfs.load_file(URL, framework="np")
        with environment(AWS_SECRET_ACCESS_KEY="x"):
            with self.assertRaises(PermissionError):
                tensorfs.load_file(URL, framework="np")
        self.assert_same(tensorfs.load_file(URL, framework="np"))

    def test_a_url_as_a_path_is_refused_with_a_hint(self):
        with self.assertRaisesRegex(FileNotFoundError, "begins with s3:// .in Python, give it as a str"):
            tensorfs.load_file(Path(URL), framework="np")

    def test_a_url_in_place_of_a_path_of_this_machine_is_refused_and_nothing_is_made(self):
        before = os.getcwd()
        os.chdir(self.tmp)
        self.addCleanup(os.chdir, before)
        why = "is a URL, and only paths of this machine are possible here"
        for url in (URL, Path(URL)):
            for name in ("cache_dir", "credentials_file", "ca_file", "rename", "key_file"):
                with self.assertRaisesRegex((ValueError, tensorfs.SafetensorError), why):
                    tensorfs.load_file(self.source, framework="np", **{name: url})
            with self.assertRaisesRegex(tensorfs.SafetensorError, "only local files are written"):
                tensorfs.consolidate(self.source, url)
        with environment(TENSORFS_CACHE_DIR=URL), self.assertRaisesRegex(ValueError, f"TENSORFS_CACHE_DIR: {URL}"):
            tensorfs.load_file(self.source, framework="np")
        self.assertEqual(list(self.tmp.iterdir()), [])

    def test_tensors_of_a_url_are_those_of_the_folder(self):
        code = """
import sys
import numpy as np
import tensorfs

url, folder = sys.argv[1:3]
local = tensorfs.load_file(folder, framework="np")
remote = tensorfs.load_file(url, framework="np")
assert local.keys() == remote.keys()
with tensorfs.safe_open(url, framework="np") as file:
    for name, tensor in local.items():
        assert (remote[name] == tensor).all() and (file.get_tensor(name) == tensor).all()
    part = max(local, key=lambda name: local[name].ndim)
    assert (file.get_slice(part)[1:3] == local[part][1:3]).all()
tensorfs.consolidate(url, sys.argv[3])
for url, error in ((url + "/none", FileNotFoundError), ("s3://none/x", FileNotFoundError)):
    try:
        tensorfs.load_file(url, framework="np")
    except error as e:
        assert e.filename == url, e.filename
    else:
        raise AssertionError(url)
"""
        out = self.tmp / "whole.safetensors"
        python(code, URL, self.source, out, **self.server.environment())
        self.assert_same(safetensors.numpy.load_file(out))

    def test_a_url_of_a_plain_server_is_loaded_and_a_refusal_has_its_exception(self):
        self.server.public.add("bucket")
        url = f"{self.server.url}/bucket/models/tiny"
        self.assert_same(tensorfs.load_file(url, framework="np"))
        self.server.public.clear()
        with self.assertRaises(PermissionError) as raised:
            tensorfs.load_file(url, framework="np")
        self.assertIn("it is not public", str(raised.exception))
        self.assertEqual(raised.exception.filename, url)

    def test_a_server_that_is_gone_is_an_error_of_the_system(self):
        url = f"{self.server.url}/bucket/models/tiny"
        self.server.stop()
        with self.assertRaises(OSError) as raised:
            tensorfs.load_file(url, framework="np")
        self.assertIn("no connection to 127.0.0.1", str(raised.exception))


class SettingsOfOneSource(TestCase):
    """Arguments of `safe_open` about one remote source, while the environment has keys that no server accepts."""

    def setUp(self):
        super().setUp()
        self.source = FIXTURES / "hf/gpt2_tiny"
        self.server = ObjectServer().start()
        self.addCleanup(self.server.stop)
        self.server.put_folder("settings", "models/tiny", self.source)
        wrong = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y"}
        variables = environment(**self.server.environment(), **{"HOME": str(self.tmp)})
        variables.__enter__()
        self.addCleanup(variables.__exit__, None, None, None)
        others = environment(**wrong)
        others.__enter__()
        self.addCleanup(others.__exit__, None, None, None)
        self.profiles = self.tmp / "profiles"
        keys = f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        self.profiles.write_text(f"[default]\naws_access_key_id = x\naws_secret_access_key = y\n[work]\n{keys}")
        self.how = {"endpoint": self.server.url, "region": "us-east-1", "credentials_file": self.profiles, "profile": "work"}
        self.expected = tensorfs.load_file(self.source, framework="np")

    def assert_same(self, tensors):
        self.assertEqual(tensors.keys(), self.expected.keys())
        for name, tensor in self.expected.items():
            np.testing.assert_array_equal(tensors[name], tensor)

    def test_each_way_to_open_takes_them_and_they_are_for_that_source_alone(self):
        self.assert_same(tensorfs.load_file(OTHER_URL, framework="np", **self.how))
        with tensorfs.safe_open(OTHER_URL, framework="np", **self.how) as file:
            self.assert_same(file.get_tensors())
        self.assert_same({name: tensor[...] for name, tensor in tensorfs.lazy(OTHER_URL, "np", **self.how).items()})
        into = {name: np.zeros_like(tensor) for name, tensor in self.expected.items()}
        tensorfs.load_into(into, OTHER_URL, **self.how)
        self.assert_same(into)
        out = self.tmp / "whole.safetensors"
        tensorfs.consolidate(OTHER_URL, out, **self.how)
        self.assert_same(safetensors.numpy.load_file(out))
        # A view also reads the config beside the shards.
        with tensorfs.safe_open(OTHER_URL, framework="np", include="*", dtype="f16", **self.how) as file:
            self.assertEqual(set(file.keys()), set(self.expected))
        with self.assertRaises(OSError) as raised:
            tensorfs.load_file(OTHER_URL, framework="np")
        self.assertIn("127.0.0.1:1", str(raised.exception))

    def test_a_reference_and_a_config_in_the_bucket_are_asked_for_with_them(self):
        # With the keys of the environment, the server would refuse the request for the reference.
        index = f"{OTHER_URL}/model.safetensors.index.json"
        self.assert_same(tensorfs.load_file(OTHER_URL, framework="np", reference=index, **self.how))
        self.assert_same(tensorfs.load_file(self.source, framework="np", reference=index, **self.how))
        out = self.tmp / "out"
        tensorfs.consolidate(self.source, out, config=OTHER_URL, **self.how)
        self.assertEqual((out / "config.json").read_bytes(), (self.source / "config.json").read_bytes())

    def test_a_mount_reads_its_source_itself_and_leaves_the_reference_to_them(self):
        options = [f"endpoint={self.server.url}", "region=us-east-1", f"credentials-file={self.profiles}", "profile=work"]
        with Mount(OTHER_URL, *options) as mount:
            self.assert_same(tensorfs.load_file(mount.path, framework="np"))
            with self.assertRaises(tensorfs.SafetensorError) as raised:
                tensorfs.load_file(mount.path, framework="np", profile="work")
            self.assertIn("profile= means nothing here", str(raised.exception))
        index, out = f"{OTHER_URL}/model.safetensors.index.json", self.tmp / "whole.safetensors"
        with Mount(self.source) as mount:
            self.assert_same(tensorfs.load_file(mount.path, framework="np", reference=index, **self.how))
            tensorfs.consolidate(mount.path, out, reference=index, **self.how)
        self.assert_same(safetensors.numpy.load_file(out))

    def test_those_that_mean_nothing_for_a_source_are_refused(self):
        file = sorted(self.source.glob("*.safetensors"))[0]
        for source, how, why in (
            (self.source, {"profile": "work"}, "profile= means nothing here: leave it out"),
            ([file], {"region": "x"}, "region= means nothing here"),
            (f"{self.server.url}/settings/models/tiny", {"endpoint": self.server.url}, "endpoint= means nothing here"),
            ("redis://127.0.0.1:1/0/x", {"credentials_file": self.profiles}, "credentials_file= means nothing here"),
        ):
            with self.subTest(source=source), self.assertRaises(tensorfs.SafetensorError) as raised:
                tensorfs.load_file(source, framework="np", **how)
            self.assertIn(why, str(raised.exception))
        with self.assertRaises(tensorfs.SafetensorError) as raised:
            tensorfs.consolidate(self.source, self.tmp / "out", profile="work")
        self.assertIn("profile= means nothing here", str(raised.exception))

    def test_two_settings_of_one_bucket_stand_beside_each_other(self):
        other = {**self.how, "profile": "default"}
        with tensorfs.safe_open(OTHER_URL, framework="np", **self.how) as file:
            with self.assertRaises(PermissionError) as raised:
                tensorfs.load_file(OTHER_URL, framework="np", **other)
            self.assertIn("the access key is unknown", str(raised.exception))
            self.assert_same(file.get_tensors())
        again = tensorfs.safe_open(OTHER_URL, framework="np", **self.how)
        self.assert_same(pickle.loads(pickle.dumps(again)).get_tensors())
        self.assertNotIn(SECRET_KEY.encode(), pickle.dumps(again))

    def test_urls_that_are_opened_in_a_patched_block_have_them(self):
        file = sorted(self.source.glob("*.safetensors"))[0]
        with tensorfs.patched(**self.how):
            self.assert_same(safetensors.numpy.load_file(OTHER_URL))
            self.assertTrue(safetensors.numpy.load_file(file))
        for call in (tensorfs.patched, lambda **how: tensorfs.load_file(OTHER_URL, framework="np", **how)):
            with self.assertRaisesRegex(TypeError, "unexpected argument 'profil'"), call(profil="work"):
                pass

    def test_files_with_settings_of_a_patched_block_are_those_of_its_working_directory(self):
        before = os.getcwd()
        self.addCleanup(os.chdir, before)
        os.chdir(self.profiles.parent)
        with tensorfs.patched(**{**self.how, "credentials_file": self.profiles.name}):
            os.chdir("/")
            self.assert_same(safetensors.numpy.load_file(OTHER_URL))

    def test_a_list_of_files_and_a_mapping_take_them(self):
        files = [f"{OTHER_URL}/{path.name}" for path in sorted(self.source.glob("*.safetensors"))]
        with tensorfs.safe_open(files, framework="np", **self.how) as file:
            self.assert_same(file.get_tensors())

    def test_neither_a_handle_nor_its_errors_show_what_may_be_secret(self):
        shown = "https://host/models/tiny"
        url = f"{shown}?X-Amz-Signature=hunter2"
        for source in (url, [url], {"a": url}):
            handle = object.__new__(tensorfs.safe_open)
            handle._filename, handle._open = source, None
            self.assertIn(shown, repr(handle))
            self.assertNotIn("hunter2", repr(handle))

    def test_no_error_of_python_shows_what_may_be_secret(self):
        nowhere = "http://user:hunter2@127.0.0.1:1/models/tiny.safetensors?sig=hunter2"

        def mount():
            with tensorfs.mount(nowhere):
                self.fail("it is not mounted")

        for call, shown in (
            (mount, "127.0.0.1:1/models/tiny.safetensors"),
            (lambda: tensorfs.load_file(f"{nowhere}\0", framework="np"), "a path holds no NUL byte"),
        ):
            with self.subTest(shown=shown), self.assertRaises(Exception) as raised:
                call()
            said = f"{raised.exception!r} {vars(raised.exception)}"
            self.assertIn(shown, said)
            self.assertNotIn("hunter2", said)

    def test_what_cannot_be_read_or_may_be_secret_is_refused(self):
        for how, why in (
            ({"endpoint": "http://user:hunter2@host"}, "endpoint: expected http(s)://HOST[:PORT]"),
            ({"credentials_file": self.tmp / "none"}, "none: No such file"),
            ({"ca_file": self.tmp / "none"}, "none: No such file"),
        ):
            with self.assertRaises(tensorfs.SafetensorError) as raised:
                tensorfs.safe_open(OTHER_URL, framework="np", **how)
            self.assertIn(why, str(raised.exception))
            self.assertNotIn("hunter2", str(raised.exception))
        with self.assertRaises(TypeError):
            tensorfs.safe_open(OTHER_URL, framework="np", profile=1)
        with self.assertRaises(ValueError):
            tensorfs.safe_open(OTHER_URL, framework="np", profile="")
