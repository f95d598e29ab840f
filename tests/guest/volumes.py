"""The servers of `devices.py`, and beside them whole volumes: an instance manager, three replicas and an engine under each
frontend that makes a device, started by `longhornctl up`, restarted by the manager alone."""
import os, signal, sys
import initiator
from devices import KINDS as SERVERS, WORK, expect, kernel_is, nodes, run, skip, wait_for

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "e2e"))
from harness import BIN, Host, contents, stand_still  # noqa: E402, F401

# Seconds that an engine may take from its death to its next start, in a guest beside other work.
AGAIN = 60


def loses_requests_of_the_dead(frontend):
    """True where a request fails that a FUSE server was just reading when it was killed. A kernel finds the pages of a process
    that is being killed only if it looks them up without locks (HAVE_GUP_FAST); User Mode Linux does not. On the machine's own
    kernel, tests/e2e/upgrade.py kills a FUSE server under load."""
    return frontend == "fuse" and os.environ.get("LH_GUEST") == "1"


def taken_by_auto():
    """The frontend that `auto` takes where there are all: ublk, unless its driver may not survive a killed engine."""
    return "ublk" if kernel_is(6, 16) else "nbd"


class Volume:
    """A volume of three replicas in memory."""

    def __init__(self, frontend, volume="vol", size=512 << 20, where=WORK, replicas=3, shown_by=None, **_):
        self.frontend, self.name, self.size, self.replicas = frontend, frontend + "-volume", size, replicas
        if frontend == "iscsi":
            lacking = initiator.ready()
            if lacking:
                skip(self.name, lacking)
                sys.exit(0)
        self.host = Host(where)
        self.volume = self.host.name(volume)
        said = self.host.up(self.volume, "--size", str(size), "--replicas", str(replicas), "--frontend", frontend)
        expect(said["frontend"] == (shown_by or frontend), f"shown by {said['frontend']}")
        self.device = said["device"]
        expect(self.device == f"/dev/longhorn/{self.volume}", f"the device is {self.device}")
        self.engine = said["engine_pid"]
        self.numbers = self.device_numbers()

    def device_numbers(self):
        numbers = os.stat(self.device).st_rdev
        return f"{os.major(numbers)}:{os.minor(numbers)}"

    def kill(self):
        os.kill(self.engine, signal.SIGKILL)

    def restart(self):
        """Its manager does that; this waits for it."""
        def again():
            pid = self.host.status(self.volume)["engine_pid"]
            return pid if pid not in (None, self.engine) else None
        self.engine = wait_for("the engine's next start", again, AGAIN)

    def upgrade(self):
        before = self.engine
        self.host.ctl("upgrade", self.volume)
        self.engine = self.host.status(self.volume)["engine_pid"]
        expect(self.engine not in (None, before), f"engine {before}, then {self.engine}")

    def resize(self, size):
        self.host.ctl("resize", self.volume, str(size))
        self.size = size

    def refuses_to_stop(self):
        done = self.host.ctl("down", self.volume, check=False)
        return done.returncode == 1 and "in use" in done.stderr

    def manager(self):
        """Pid of its instance manager."""
        managers = [pid for pid in self.host.processes() if b"\0instance-manager\0" in open(f"/proc/{pid}/cmdline", "rb").read()]
        expect(len(managers) == 1, f"instance managers: {managers}")
        return managers[0]

    def hide(self):
        self.engine_line("frontend", "shutdown")
        expect(not os.path.exists(self.device), f"{self.device} is still there")

    def show(self):
        self.engine_line("frontend", "start", self.frontend)
        expect(os.path.exists(self.device), f"{self.device} is not there")

    def engine_line(self, *words, check=True):
        """Longhorn's own command line of an engine."""
        socket = os.path.join(self.host.root, "run", f"{self.volume}-e-0.grpc.sock")
        return run(os.path.join(BIN, "longhorn"), "--url", f"unix:{socket}", *words, check=check)

    def down(self):
        self.host.healthy(self.volume, replicas=self.replicas)
        self.host.ctl("down", self.volume)
        expect(not os.path.exists(self.device), f"{self.device} is still there")
        expect(nodes() == [], f"left behind: {nodes()}")

    def up(self):
        self.engine = self.host.up(self.volume)["engine_pid"]

    def remove(self):
        self.host.ctl("rm", self.volume, "--yes")

    def stop(self):
        self.down()
        self.remove()


def kind(frontend):
    return lambda **options: Volume(frontend, **options)


KINDS = {**SERVERS, **{f"{frontend}-volume": kind(frontend) for frontend in ("ublk", "nbd", "iscsi", "fuse")}}
