"""Links of a tenant: each shows only what its own path and every path that it leads to let the reader see."""

import contextlib
import json
import os
import shutil
import struct

import checkpoints
from mounts import Mount, TestCase, needs_root, run, tensorfs, wait_until
from test_view_ranks import model

A, B = 6001, 6002
TENANT = {"user": 5001, "group": 5001, "extra_groups": []}
MEMBER_A = {"user": 5004, "group": 5004, "extra_groups": [A]}
MEMBER_B = {"user": 5005, "group": 5005, "extra_groups": [B]}
OF_BOTH = {"user": 5003, "group": 5003, "extra_groups": [A, B]}
EVERYONE = (TENANT, MEMBER_A, MEMBER_B, OF_BOTH)
RULES = f"access=team-a/**:5001:{A}:0750,access=team-b/**:0:{B}:0750"

# Every way in, as each of some users: prints what they saw of each path.
PROBE = """
import json, os, sys
users, paths = json.loads(sys.argv[1]), sys.argv[2:]

def probe(path):
    found = {}
    folder, name = os.path.split(path)
    def attempt(what, call):
        try:
            found[what] = call()
        except OSError:
            pass
    attempt("stat", lambda: os.stat(path).st_size)
    attempt("read", lambda: open(path, "rb").read(64).hex())
    attempt("list", lambda: os.listdir(path))
    attempt("xattrs", lambda: os.listxattr(path))
    for key in ("user.tensorfs.version", "user.tensorfs.source", "user.tensorfs.tail", "trusted.tensorfs.limited"):
        attempt(key, lambda: os.getxattr(path, key).decode())
    attempt("access", lambda: os.access(path, os.R_OK))
    attempt("shown", lambda: name in os.listdir(folder))
    attempt("shown with attributes", lambda: bool([e.stat() for e in os.scandir(folder) if e.name == name]))
    attempt("beside", lambda: os.stat(f"{folder}/../{os.path.basename(folder)}/{name}").st_size)
    return {what: seen for what, seen in found.items() if seen is not False}

for user, group, groups in users:
    child = os.fork()
    if child == 0:
        os.setgroups(groups)
        os.setgid(group)
        os.setuid(user)
        print(json.dumps([user, [probe(path) for path in paths]]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


class LinkCase(TestCase):
    def setUp(self):
        super().setUp()
        self.source = self.tmp / "source"
        self.own = checkpoints.numbered_set(self.source / "team-a", 1)
        os.chown(self.own, TENANT["user"], A)
        self.other = self.folder("team-b", 0o750, B)
        self.vault = self.folder("vault", 0o700, 0)
        self.secret = self.file(self.other / "secret.safetensors", 0o640, B)
        self.file(self.vault / "secret.safetensors", 0o600, 0)

    def folder(self, name, mode, group):
        folder = self.source / name
        folder.mkdir()
        os.chown(folder, 0, group)
        folder.chmod(mode)
        return folder

    def file(self, path, mode, group):
        checkpoints.write_one(path, "secret", 7, length=5000)
        os.chown(path, 0, group)
        path.chmod(mode)
        return path

    def cuts(self):
        """The options that show all of two ranks."""
        rules = self.tmp / "cuts.toml"
        rules.write_text("[[rule]]\nregex = '.*'\ncut = 0\n")
        return f"tp=2,tp-rules={rules}"

    def link(self, name, target, who=TENANT):
        """A link that a tenant makes."""
        path = self.own / name
        self.assertEqual(run("ln", "-sfn", target, path, **who).code, 0)
        return path

    def probe_all(self, paths, everyone):
        """The facts that each user gets of each path, by user."""
        users = json.dumps([[who["user"], who["group"], who["extra_groups"]] for who in everyone])
        outcome = run("/usr/bin/python3", "-S", "-c", PROBE, users, *paths)
        self.assertEqual(outcome.code, 0, outcome.stderr)
        return dict(json.loads(line) for line in outcome.stdout.splitlines())

    def probe(self, path, who):
        return self.probe_all([path], [who])[who["user"]][0]

    def assert_open_to(self, paths, *allowed):
        """Only these users, and root, see anything of the files or folders."""
        paths = paths if isinstance(paths, list) else [paths]
        seen = self.probe_all(paths, EVERYONE)
        for who in EVERYONE:
            for path, found in zip(paths, seen[who["user"]]):
                with self.subTest(str(path), user=who["user"]):
                    if who in allowed:
                        self.assertTrue({"stat", "shown", "access"} <= set(found), found)
                        self.assertTrue({"read", "list"} & set(found), found)
                    else:
                        self.assertEqual(found, {})
                self.assertTrue(path.exists())


@needs_root
class Links(LinkCase):
    def test_a_link_to_a_file_or_a_folder_is_for_those_who_may_read_both_paths(self):
        self.link("file.safetensors", "../team-b/secret.safetensors")
        self.link("folder", "../team-b")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            paths = [m.path / "team-a" / name for name in ("file.safetensors", "folder", "folder/secret.safetensors")]
            self.assert_open_to(paths, OF_BOTH)
            self.assert_open_to(m.path / "team-b" / "secret.safetensors", MEMBER_B, OF_BOTH)
            self.assert_open_to(m.path / "team-a" / "model.safetensors", TENANT, MEMBER_A, OF_BOTH)

    def test_a_path_without_a_rule_is_shown_by_links_to_those_whom_the_source_lets_in(self):
        self.file(self.source / "own.safetensors", 0o600, 0)
        self.folder("closed", 0o700, 0)
        self.file(self.source / "closed" / "open.safetensors", 0o644, 0)
        self.folder("public", 0o755, 0)
        self.file(self.source / "public" / "open.safetensors", 0o644, 0)
        self.file(self.source / "public" / "of-b.safetensors", 0o640, B)
        for name, target in (
            ("1", "vault"),
            ("2.safetensors", "../vault/secret.safetensors"),
            ("3.safetensors", "../own.safetensors"),
            ("4.safetensors", "../closed/open.safetensors"),
            ("5.safetensors", "../public/open.safetensors"),
            ("6.safetensors", "../public/of-b.safetensors"),
        ):
            self.link(name, target if "/" in target else f"../{target}")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            paths = [m.path / "team-a" / name for name in ("1", "1/secret.safetensors", "2.safetensors", "3.safetensors", "4.safetensors")]
            self.assert_open_to(paths)
            self.assert_open_to(m.path / "team-a" / "5.safetensors", TENANT, MEMBER_A, OF_BOTH)
            self.assert_open_to(m.path / "team-a" / "6.safetensors", OF_BOTH)

    def test_every_path_on_the_way_of_a_link_counts(self):
        self.folder("public", 0o755, 0)
        self.file(self.source / "public" / "open.safetensors", 0o644, 0)
        (self.other / "hop.safetensors").symlink_to("../public/open.safetensors")
        (self.other / "hop").symlink_to("../public")
        (self.source / "public" / "back.safetensors").symlink_to("../team-b/secret.safetensors")
        self.link("1.safetensors", "../team-b/hop.safetensors")
        self.link("2", "../team-b/hop")
        self.link("3.safetensors", "../public/back.safetensors")
        self.link("4.safetensors", "3.safetensors")
        self.link("5.safetensors", "../team-b/../team-b/./secret.safetensors")
        self.link("6.safetensors", self.secret)
        self.link("7", "../public")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            paths = [m.path / "team-a" / name for name in ("1.safetensors", "2", "2/open.safetensors", "3.safetensors", "4.safetensors", "5.safetensors",
                         "6.safetensors", "7/back.safetensors")]
            self.assert_open_to(paths, OF_BOTH)
            self.assert_open_to(m.path / "team-a" / "7" / "open.safetensors", TENANT, MEMBER_A, OF_BOTH)
            self.assert_open_to(m.path / "public" / "back.safetensors", MEMBER_B, OF_BOTH)

    def test_a_merged_file_and_what_is_made_beside_it_are_for_those_who_may_read_every_shard(self):
        shard = checkpoints.shard_name(2, 3)
        (self.own / shard).rename(self.other / shard)
        os.chown(self.other / shard, 0, B)
        (self.other / shard).chmod(0o640)
        self.link(shard, f"../team-b/{shard}")
        refused = self.source / "team-a" / "refused"
        checkpoints.numbered_set(refused, 3)
        (refused / shard).unlink()
        (self.other / "broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0secret")
        (refused / shard).symlink_to("../../team-b/broken.safetensors")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            paths = [m.path / "team-a" / name for name in ("model.safetensors", "model.safetensors.index.json", "refused/TENSORFS-ERROR.txt")]
            self.assert_open_to(paths, OF_BOTH)
            self.assert_open_to(m.path / "team-a" / "config.json", TENANT, MEMBER_A, OF_BOTH)
        with Mount(self.source, f"allow_other,{self.cuts()},{RULES}") as m:
            for rank in ("tp-2/rank-0", "tp-2/rank-1"):
                self.assert_open_to(m.path / rank / "team-a" / "model.safetensors", OF_BOTH)
                self.assert_open_to(m.path / rank / "team-a" / "config.json", TENANT, MEMBER_A, OF_BOTH)

    def test_rank_shards_of_a_folder_below_count_for_the_file_of_the_folder_above(self):
        shutil.rmtree(self.own)
        self.own.mkdir()
        os.chown(self.own, TENANT["user"], A)
        checkpoints.row_wise(self.other / "ranks", 2)
        self.link("sharded", "../team-b/ranks")
        (self.own / "config.json").write_text("{}")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            (found,) = [path for path in (m.path / "team-a").rglob("*.safetensors")]
            self.assert_open_to(found, OF_BOTH)

    def test_the_blobs_of_a_hub_model_are_read_by_its_snapshots(self):
        cache = self.source / "hub"
        checkpoints.hub_cache(cache / "models--org--name", self.own)
        for path in cache.rglob("blobs/*"):
            path.chmod(0o600)
        self.source.chmod(0o700)
        (model,) = cache.glob("models--*")
        (snapshot,) = (model / "snapshots").iterdir()
        name = (snapshot / "model.safetensors").relative_to(self.source)
        with Mount(self.source, f"allow_other,access=hub/**:0:{A}:0750") as m:
            self.assert_open_to(m.path / name, MEMBER_A, OF_BOTH)
        with Mount(self.source, f"allow_other,{RULES}") as m:
            self.assert_open_to(m.path / name, *EVERYONE)
        # The paths of the blobs count as well.
        blobs = (model / "blobs").relative_to(self.source)
        with Mount(self.source, f"allow_other,access={blobs}/**:0:{B}:0750,{RULES}") as m:
            self.assert_open_to(m.path / name, MEMBER_B, OF_BOTH)
        # A folder called so by a tenant gives him nothing.
        self.source.chmod(0o755)
        fake = self.own / "models--evil"
        for command in (["mkdir", "-p", fake / "snapshots" / "1"], ["ln", "-s", "../../team-b", fake / "blobs"]):
            self.assertEqual(run(*command, **TENANT).code, 0)
        self.link("models--evil/snapshots/1/model.safetensors", "../../blobs/secret.safetensors")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            self.assert_open_to(m.path / "team-a/models--evil/snapshots/1/model.safetensors", OF_BOTH)
            self.assert_open_to(m.path / "team-a/models--evil/blobs/secret.safetensors", OF_BOTH)

    def test_a_link_within_the_paths_of_one_rule_is_for_all_whom_the_rule_lets_in(self):
        run_folder = self.own / "run-500"
        checkpoints.numbered_set(run_folder, 5)
        for path in run_folder.iterdir():
            path.chmod(0o600)
        run_folder.chmod(0o700)
        self.link("latest", "run-500")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            for name in ("run-500", "latest"):
                self.assert_open_to(m.path / "team-a" / name / "model.safetensors", MEMBER_A, TENANT, OF_BOTH)

    def test_a_folder_that_follow_names_is_shown_to_those_whom_it_lets_in(self):
        outside = self.tmp / "outside"
        outside.mkdir()
        self.file(outside / "open.safetensors", 0o644, 0)
        self.file(outside / "of-b.safetensors", 0o640, B)
        for name in ("open.safetensors", "of-b.safetensors"):
            self.link(name, outside / name)
        self.link("all", outside)
        with Mount(self.source, f"allow_other,follow={outside},{RULES}") as m:
            for folder in ("team-a", "team-a/all"):
                self.assert_open_to(m.path / folder / "open.safetensors", TENANT, MEMBER_A, OF_BOTH)
                self.assert_open_to(m.path / folder / "of-b.safetensors", OF_BOTH)
        outside.chmod(0o700)
        with Mount(self.source, f"allow_other,follow={outside},{RULES}") as m:
            paths = [m.path / "team-a" / name for name in ("open.safetensors", "all", "all/open.safetensors")]
            self.assert_open_to(paths)

    def test_files_of_config_are_for_those_who_see_the_checkpoint_unless_links_lead_to_them(self):
        config = self.tmp / "config"
        config.mkdir(mode=0o700)
        (self.own / "config.json").unlink()
        for name in ("config.json", "real.json"):
            (config / name).write_text("{}")
            (config / name).chmod(0o600)
        (config / "link.json").symlink_to("real.json")
        with Mount(self.own, f"allow_other,config={config},access=other:::0700") as m:
            self.assert_open_to(m.path / "config.json", *EVERYONE)
            self.assert_open_to(m.path / "link.json")

    def test_an_acl_of_the_source_leaves_what_links_lead_to_for_its_owner(self):
        self.folder("public", 0o755, 0)
        path = self.file(self.source / "public" / "open.safetensors", 0o644, 0)
        self.link("open.safetensors", "../public/open.safetensors")
        # Version 2; owner rw, user 5001 none, group and others r.
        entries = [(1, 6, 2**32 - 1), (2, 0, 5001), (4, 4, 2**32 - 1), (16, 4, 2**32 - 1), (32, 4, 2**32 - 1)]
        acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
        try:
            os.setxattr(path, "system.posix_acl_access", acl)
        except OSError as e:
            self.skipTest(f"no ACLs here: {e}")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            self.assert_open_to(m.path / "team-a" / "open.safetensors")

    def test_a_user_who_may_read_a_link_opens_the_way_for_no_other(self):
        self.link("folder", "../team-b")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            path = m.path / "team-a" / "folder" / "secret.safetensors"
            with contextlib.ExitStack() as stack:
                reader = stack.enter_context(open(path, "rb"))
                self.assertTrue(reader.read(10))
                for _ in range(3):
                    self.assertEqual(self.probe(path, TENANT), {})
                    self.assertTrue(self.probe(path, OF_BOTH)["read"])
                # A folder that is held open keeps nobody in it.
                held = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
                stack.callback(os.close, held)
                words = ["/usr/bin/python3", "-c", "import os, sys; os.open('secret.safetensors', 0, dir_fd=int(sys.argv[1]))"]
                self.assertNotEqual(run(*words, held, pass_fds=[held], **TENANT).code, 0)
                self.assertEqual(run(*words, held, pass_fds=[held], **OF_BOTH).code, 0)

    def test_without_rules_all_that_the_mount_shows_is_for_all_its_users(self):
        self.link("file.safetensors", "../team-b/secret.safetensors")
        with Mount(self.source, "allow_other") as m:
            self.assert_open_to(m.path / "team-a" / "file.safetensors", *EVERYONE)

    def test_permissions_of_the_source_that_change_count_within_a_second(self):
        self.folder("public", 0o755, 0)
        path = self.file(self.source / "public" / "open.safetensors", 0o644, 0)
        self.link("open.safetensors", "../public/open.safetensors")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            shown = m.path / "team-a" / "open.safetensors"
            self.assertTrue(self.probe(shown, TENANT))
            path.chmod(0o600)
            wait_until(lambda: not self.probe(shown, TENANT), 10, "the link to close")
            path.chmod(0o644)
            wait_until(lambda: self.probe(shown, TENANT), 10, "the link to open")


@needs_root
class Changes(LinkCase):
    def test_a_link_that_is_made_or_turned_after_the_mount_shows_no_more(self):
        self.folder("public", 0o755, 0)
        self.file(self.source / "public" / "secret.safetensors", 0o644, 0)
        self.link("turned", "../public")
        self.link("turned.safetensors", "../public/secret.safetensors")
        with Mount(self.source, f"allow_other,watch=auto,{RULES}") as m:
            folder = m.path / "team-a"
            self.assertTrue(self.probe(folder / "turned" / "secret.safetensors", TENANT))
            self.assertTrue(self.probe(folder / "turned.safetensors", TENANT))
            self.link("turned", "../team-b")
            self.link("turned.safetensors", "../team-b/secret.safetensors")
            self.link("new.safetensors", "../team-b/secret.safetensors")
            for name in ("turned/secret.safetensors", "turned.safetensors", "new.safetensors"):
                found = lambda: self.probe(folder / name, OF_BOTH) and not self.probe(folder / name, TENANT)
                wait_until(found, 20, name)

    def test_a_folder_that_became_a_link_after_the_mount_shows_no_more_without_watch(self):
        for proved in (False, True):
            with self.subTest(proved=proved):
                mine = self.own / f"mine-{proved}"
                self.assertEqual(run("mkdir", mine, **TENANT).code, 0)
                shutil.copy(self.secret, mine / "secret.safetensors")
                (mine / "notes.txt").write_text("mine")
                (self.other / "notes.txt").write_text("theirs")
                (self.other / "notes.txt").chmod(0o600)
                with Mount(self.source, f"allow_other,watch=off,{RULES}") as m:
                    shown = m.path / "team-a" / mine.name
                    if proved:
                        self.assertTrue(self.probe(shown / "secret.safetensors", TENANT))
                    self.assertEqual(run("mv", mine, f"{mine}-away", **TENANT).code, 0)
                    self.link(mine.name, "../team-b")
                    # The kernel may know the size of the tenant's own file for a second.
                    for name in ("secret.safetensors", "notes.txt"):
                        found = lambda: {**self.probe(shown / name, TENANT), "stat": None}
                        self.assertNotIn("read", found())
                        wait_until(lambda: found() == {"stat": None}, 10, name)


@needs_root
class Told(LinkCase):
    def test_models_behind_links_are_named_to_those_who_may_list_them(self):
        self.link("folder", "../team-b")
        with Mount(self.source, f"allow_other,{RULES}") as m:
            for who in EVERYONE:
                self.probe(m.path / "team-a" / "folder", who)
            for who, models in (
                (TENANT, ["team-a", "vault"]),
                (MEMBER_B, ["team-b", "vault"]),
                (OF_BOTH, ["team-a", "team-a/folder", "team-b", "vault"]),
            ):
                (one,) = tensorfs("status", "--json", m.path, **who).json()
                self.assertEqual(sorted(one["models"]), models)

    def test_the_source_attribute_names_no_models_that_the_caller_may_not_list(self):
        shutil.rmtree(self.source)
        self.source.mkdir()
        for name in ("team-a", "team-b", "vault"):
            model(self.source / name, "llama")
        rules = f"access=team-a/**:5001:{A}:0750,access=team-b/**:0:0:0700"
        for closed in (0o755, 0o700):
            self.other.chmod(closed)
            self.vault.chmod(closed)
            with Mount(self.source, f"allow_other,tp=2,watch=off,{rules}") as m:
                for path in m.path.rglob("*.safetensors"):
                    path.stat()
                for folder in (m.path, m.path / "tp-2", m.path / "tp-2" / "rank-0"):
                    for who in (TENANT, MEMBER_A):
                        said = self.probe(folder, who).get("user.tensorfs.source", "")
                        self.assertNotIn("team-b", said)
                        if closed == 0o700:
                            self.assertNotIn("vault", said)
                    if folder != m.path / "tp-2" and folder != m.path:
                        self.assertIn("team-b", os.getxattr(folder, "user.tensorfs.source").decode())


@needs_root
class Rules(LinkCase):
    def test_rules_about_the_paths_of_the_source_hold_in_the_folders_of_ranks_and_of_a_hub_cache(self):
        with Mount(self.source, f"allow_other,{self.cuts()},{RULES}") as m:
            for rank in ("tp-2/rank-0", "tp-2/rank-1"):
                self.assert_open_to(m.path / rank / "team-a" / "model.safetensors", TENANT, MEMBER_A, OF_BOTH)
                self.assert_open_to(m.path / rank / "team-b" / "secret.safetensors", MEMBER_B, OF_BOTH)
            self.assertNotIn("access", m.log())
        with Mount(self.source, f"allow_other,layout=hub,{RULES}") as m:
            (secret,) = (m.path / "models--team-b").glob("snapshots/*/secret.safetensors")
            self.assert_open_to(secret, MEMBER_B, OF_BOTH)
        rules = f"access=tp-2/rank-1/**:0:{B}:0750,{RULES}"
        with Mount(self.source, f"allow_other,{self.cuts()},{rules}") as m:
            self.assert_open_to(m.path / "tp-2/rank-1/team-a/model.safetensors", MEMBER_B, OF_BOTH)
            self.assert_open_to(m.path / "tp-2/rank-0/team-a/model.safetensors", TENANT, MEMBER_A, OF_BOTH)

    def test_a_rule_that_is_about_nothing_is_told_at_the_mount_in_the_log_by_status_and_by_the_check(self):
        mine = "access=.:::0755,access=team-a/model.safetensors::6001:,access=team-a/model-00001*:::0400"
        rules = f"{mine},access=team-x/**:::0700,access=team-a/*/deep:::0700,{RULES}"
        expected = ["team-x/**", "team-a/*/deep"]
        at = self.mount_point()
        log = self.tmp / "log"
        outcome = tensorfs("mount", self.source, at, "-o", f"allow_other,watch=auto,log={log},{rules}")
        self.assert_done(outcome)
        (one,) = tensorfs("status", "--json", at).json()
        self.assertEqual(one["idle_rules"], expected)
        shown = tensorfs("status", at).stdout
        config = self.tmp / "config.toml"
        config.write_text(f'[[mount]]\nname = "m"\nsource = "{self.source}"\ntarget = "{at}"\noptions = "allow_other,{rules}"\n')
        check = tensorfs("serve", "--check", "--config", config)
        self.assertEqual(check.code, 0, check.stderr)
        for said in (outcome.stderr, log.read_text(), shown, check.stderr):
            for glob in expected:
                self.assertIn(glob, said)
            self.assertNotIn("model-00001", said.replace(mine, ""))
        # It is about something once that is there.
        self.folder("team-x", 0o755, 0)
        wait_until(lambda: tensorfs("status", "--json", at).json()[0]["idle_rules"] == expected[1:], 20, "the folder")

    def test_a_shard_takes_the_first_rule_about_it_or_about_the_file_that_it_is_merged_into(self):
        closed = "access=team-a/model-00001*:::0700"
        opened = "access=team-a/model.safetensors:::0444"
        for rules, allowed in (
            (f"{closed},{RULES}", ()),
            (f"{opened},{closed},{RULES}", (TENANT, MEMBER_A, OF_BOTH)),
            (f"{opened},access=**:5001:{A}:0750", (TENANT, MEMBER_A, OF_BOTH)),
        ):
            with self.subTest(rules), Mount(self.source, f"allow_other,{rules}") as m:
                self.assert_open_to(m.path / "team-a" / "model.safetensors", *allowed)

    def test_a_copy_of_a_folder_can_be_removed_by_its_owner(self):
        with Mount(self.source, "allow_other") as m:
            copy = self.tmp / "copies"
            copy.mkdir()
            os.chown(copy, 5001, 5001)
            self.assertEqual(run("cp", "-r", m.path / "team-a", copy / "copy", **TENANT).code, 0)
            self.assertEqual(run("rm", "-rf", copy / "copy", **TENANT).code, 0)
            self.assertFalse((copy / "copy").exists())
            self.assertEqual(run("touch", m.path / "new").code, 1)


@needs_root
class Mounts(LinkCase):
    def test_a_mount_on_a_mount_keeps_to_its_limits(self):
        self.link("file.safetensors", "../team-b/secret.safetensors")
        self.link("folder", "../team-b")
        self.other.chmod(0o755)
        self.secret.chmod(0o644)
        inner_rules = f"access=**:5001:{A}:0755"
        for options in (RULES, f"{RULES},{self.cuts()}"):
            with Mount(self.source, f"allow_other,{options}") as outer:
                base = outer.path / "tp-2" / "rank-0" if "tp=" in options else outer.path
                with Mount(base / "team-a", f"allow_other,{inner_rules}") as inner:
                    for name in ("file.safetensors", "folder/secret.safetensors"):
                        for who in (TENANT, MEMBER_A, MEMBER_B):
                            with self.subTest(name, options=options, user=who["user"]):
                                self.assertEqual(self.probe(inner.path / name, who), {})
                    self.assertTrue(self.probe(inner.path / "config.json", TENANT))
                    self.link("later.safetensors", "../team-b/secret.safetensors")
                    self.assertEqual(self.probe(inner.path / "later.safetensors", TENANT), {})
                    (self.own / "later.safetensors").unlink()
