"""Folders of HTTP servers: those that WebDAV lists, and those behind a login."""

import checkpoints
from mounts import wait_until
from object_server import ObjectServer
from test_object_stores import FILE, SHARD, RemoteCase
from web_server import DavServer, LoginServer


class Dav(RemoteCase):
    def setUp(self):
        super().setUp()
        self.dav = self.enterContext(DavServer())
        self.dav.put_folder("bucket", "models/a b", self.source)
        self.dav.put("bucket", "models/a b/more/notes of mine.txt", b"notes")
        self.url = f"{self.dav.url}/bucket/models/a%20b"

    def asked(self, method):
        return [request for request in self.dav.requests if request["method"] == method]

    def test_a_folder_of_webdav_is_listed_with_its_folders(self):
        self.assert_whole(self.url)
        with self.mount(url=self.url) as mount:
            self.assertTrue((mount.path / FILE).read_bytes() == self.whole)
            self.assertEqual((mount.path / "more/notes%20of%20mine.txt").read_bytes(), b"notes")

    def test_a_listing_spares_a_request_for_each_file(self):
        self.assert_done(self.tensorfs("ls", self.url))
        # One for each of the two folders.
        self.assertLessEqual(len(self.asked("HEAD")), 2)

    def test_rank_shards_without_a_weight_map_are_found(self):
        ranks = self.tmp / "ranks"
        ranks.mkdir()
        checkpoints.write_shard(ranks / "rank0.safetensors", [("a", "U8", [4], b"abcd")])
        self.dav.put_folder("bucket", "ranks", ranks)
        listed = self.tensorfs("ls", f"{self.dav.url}/bucket/ranks")
        self.assert_done(listed)
        self.assertIn("rank0", listed.stdout)

    def test_new_files_of_a_watched_folder_appear(self):
        with self.mount("watch=poll,watch-interval=1,watch-grace=1", url=self.url) as mount:
            self.dav.put("bucket", "models/a b/new.json", b"{}")
            wait_until(lambda: (mount.path / "new.json").exists(), 20, "the new file")

    def test_listings_with_other_etags_than_answers_are_understood(self):
        self.dav.lists_tags = False
        self.assert_whole(self.url)
        self.assertTrue([request for request in self.asked("HEAD") if SHARD in request["path"]])

    def test_properties_of_others_and_answers_for_several_places_hide_no_file(self):
        self.dav.has_own_properties = True
        self.assert_whole(self.url)
        self.dav.requests.clear()
        self.assert_done(self.tensorfs("ls", self.url))
        # The lengths and ETags of the listing count.
        self.assertLessEqual(len(self.asked("HEAD")), 2)

    def test_a_busy_server_of_webdav_is_asked_again(self):
        self.dav.faults = [{"kind": "busy", "method": "PROPFIND"}, {"kind": "hang-up", "method": "PROPFIND"}]
        with self.mount(url=self.url) as mount:
            self.assertEqual((mount.path / "more/notes%20of%20mine.txt").read_bytes(), b"notes")

    def test_a_listing_that_comes_too_late_once_hides_nothing_from_then_on(self):
        # Two tries are what a server gets that has listed nothing yet.
        self.dav.faults = [{"kind": "stall", "method": "PROPFIND", "seconds": 30, "count": 2}]
        with self.mount(url=self.url) as mount:
            self.assertGreaterEqual(len(self.asked("PROPFIND")), 3)
            self.assertEqual((mount.path / "more/notes%20of%20mine.txt").read_bytes(), b"notes")

    def test_a_server_without_webdav_is_asked_once_and_its_weight_map_counts(self):
        for fault in ({"status": 405}, {"status": 400}, {"status": 501}):
            self.dav.requests.clear()
            self.dav.faults = [{"kind": "error", "method": "PROPFIND", "count": 1000, **fault}]
            self.assert_whole(self.url)
            self.assertEqual(len(self.asked("PROPFIND")), 1)


class Logins(RemoteCase):
    def setUp(self):
        super().setUp()
        self.netrc = self.tmp / ".netrc"
        self.env["HOME"] = str(self.tmp)

    def write(self, text):
        self.netrc.write_text(text)
        self.netrc.chmod(0o600)

    def test_a_login_of_netrc_is_for_its_host_only(self):
        server = self.enterContext(LoginServer("me", "a password"))
        server.put_folder("bucket", "models/tiny", self.source)
        url = f"{server.url}/bucket/models/tiny"
        self.assert_refused(self.tensorfs("ls", url), "add its host to the file .netrc")
        self.write('machine 127.0.0.1\n login me\n password "a password"\n')
        self.assert_whole(url)
        self.write("machine 127.0.0.1 login me password another\n")
        self.assert_refused(self.tensorfs("ls", url), "the login of .netrc does not allow it")
        other = self.tmp / "other"
        other.write_text("machine example.com login me password p\n")
        self.assert_refused(self.tensorfs("ls", url, NETRC=str(other)), "add its host")
        other.write_text('default login me password "a password"\n')
        self.assert_whole(url, NETRC=str(other))

    def test_a_file_of_logins_that_others_may_read_is_refused(self):
        server = self.enterContext(LoginServer("me", "p"))
        server.put_folder("bucket", "models/tiny", self.source)
        self.write("machine 127.0.0.1 login me password p\n")
        self.netrc.chmod(0o644)
        self.assert_refused(self.tensorfs("ls", f"{server.url}/bucket/models/tiny"), "has passwords and mode 644: chmod 600")

    def test_a_login_does_not_follow_to_another_host(self):
        target = self.enterContext(ObjectServer())
        target.public.add("bucket")
        target.put_folder("bucket", "models/tiny", self.source)
        self.write("machine 127.0.0.1 login me password p\n")
        server = self.enterContext(LoginServer("me", "p"))
        place = {"Location": f"{target.url}/bucket/models/tiny/{FILE}"}
        server.faults = [{"kind": "error", "status": 302, "headers": place, "count": 1000}]
        self.tensorfs("ls", f"{server.url}/bucket/{FILE}")
        self.assertTrue(target.requests)
        self.assertFalse(any(request["signed"] for request in target.requests))
