"""Mounts whose source lies on a mount."""

import os

import checkpoints
from mounts import needs_root, wait_until
from services import PATIENCE, ServiceCase, mount_config

FILE = "model.safetensors"


@needs_root
class ServedOnMounts(ServiceCase):
    # The state named the source behind the other mount, so no process took the mount over.
    def test_readers_of_a_mount_of_a_mount_go_on_over_restarts_and_upgrades(self):
        source = checkpoints.numbered_set(self.tmp / "model", 1)
        below = self.target("below")
        views = {"above": (), "top": ()}
        overs = [self.target(name) for name in views]
        config = mount_config("below", source, below)
        service = self.serve(config)
        service.wait_until_ready()
        wait_until((below / FILE).exists, PATIENCE, "the checkpoint is shown")
        service.reload(config + "".join(mount_config(over.name, below, over, *views[over.name]) for over in overs))
        for over in overs:
            wait_until((over / FILE).exists, PATIENCE, "the checkpoint is shown on top")
        self.assert_same((overs[1] / FILE).read_bytes(), (below / FILE).read_bytes())
        right = {over: (over / FILE).read_bytes() for over in overs}
        held = {over: self.open(over / FILE) for over in overs}
        for _ in range(3):
            before, ready = service.workers(), service.manager.count("READY=1")
            service.restart()
            service.wait_until_ready(ready + 1)
            for over, descriptor in held.items():
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                self.assert_same(os.pread(descriptor, len(right[over]), 0), right[over])
            self.assertTrue(all(service.workers()[name] != pid for name, pid in before.items()))
        self.assertNotIn("cannot be taken over", service.log())
        self.assertNotIn("lost their content", service.log())
