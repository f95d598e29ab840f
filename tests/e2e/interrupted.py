"""Commands that are interrupted, by Ctrl-C or SIGTERM, in the middle of what they do: the exit status says so, one line says what is
left and what goes on, the terminal has nothing of the progress any more, and nothing is half made that a command would stumble
over."""
import fcntl, glob, json, os, pty, re, signal, subprocess, threading, time
from harness import BIN, Host, expect, kill, shown, stand_still, wait_for

STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}


class Command:
    """A command in a terminal of its own, or without one."""

    def __init__(self, host, *words, terminal=False):
        self.words = words
        line = [os.path.join(BIN, "longhornctl"), "--root", host.root, *words]
        self.terminal, theirs = pty.openpty() if terminal else (None, None)
        self.process = subprocess.Popen(line, stdin=theirs if terminal else subprocess.DEVNULL,
                                        stdout=theirs if terminal else subprocess.PIPE,
                                        stderr=theirs if terminal else subprocess.PIPE, start_new_session=True,
                                        preexec_fn=self.hears)
        self.seen = b""
        if terminal:
            os.close(theirs)
            # Read all the time: a terminal that takes nothing more holds up who writes to it.
            self.reader = threading.Thread(target=self.read, daemon=True)
            self.reader.start()

    @staticmethod
    def hears():
        """What runs in the background of a script has SIGINT ignored, and hands that down; a command keeps to it."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def read(self):
        while True:
            try:
                more = os.read(self.terminal, 65536)
            except OSError:
                return
            self.seen += more

    def interrupt(self, sign=signal.SIGINT, within=60):
        """What it said, and how it ended."""
        text = self.in_time(sign, within)
        expect(text is not None, f"{self.words} ended before it was interrupted")
        return text

    def in_time(self, sign=signal.SIGINT, within=60, again=None):
        """The same; None: it was through before. With `again` the signal is sent once more after each so many seconds."""
        until = time.monotonic() + within
        while True:
            self.process.send_signal(sign)
            try:
                said = self.process.communicate(timeout=again or within)[1]
                break
            except subprocess.TimeoutExpired:
                if not again or time.monotonic() > until:
                    self.process.kill()
                    expect(False, f"{self.words} goes on though it was interrupted")
        if self.terminal:
            self.reader.join(10)
        text = self.seen.decode(errors="replace") if self.terminal else said.decode()
        if self.process.returncode == 0:
            return None
        expect(self.process.returncode == STATUS[sign], f"{self.words}: exit status {self.process.returncode}: {text}")
        return text


def caught(begin, sign=signal.SIGINT, within=60):
    """What a command said that was interrupted in the middle. `begin` gives it, there, and undoes what one before has done: on a busy
    machine one may be through before anybody has looked."""
    for _ in range(10):
        said = begin().in_time(sign, within)
        if said is not None:
            return said
    return expect(False, "always through before it was interrupted")


STOPPED = []


def stop(pid):
    """Stops a process until `go_on`."""
    STOPPED.append(pid)
    stand_still(pid)


def go_on():
    while STOPPED:
        kill(STOPPED.pop(), signal.SIGCONT)


def as_seen(text):
    """The last lines of a terminal that was told this."""
    lines = [""]
    for part in re.split(r"(\r\n|\r|\n|\x1b\[[0-9;?]*[A-Za-z])", text):
        if part in ("\r\n", "\n"):
            lines.append("")
        elif part == "\r" or part.startswith("\x1b["):
            if part in ("\r", "\x1b[2K"):
                lines[-1] = ""
        else:
            lines[-1] += part
    return lines


def process_of(host, word):
    """The first process of this root with this word in its command line."""
    for pid in host.processes():
        try:
            words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\0")
        except OSError:
            continue
        if word.encode() in words:
            return pid
    return None


def soon(what, condition, seconds=20):
    """As `wait_for`, for what is there for milliseconds."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
    expect(False, f"{what}: never")


def made_of(host, volume):
    """What there is of a volume."""
    places = ("volumes/" + volume, f"replicas/{volume}-*", f"run/processes/{volume}-*", f"log/{volume}-*")
    return [path for place in places for path in glob.glob(os.path.join(host.root, place))]


def a_new_volume(host, terminal):
    """One whose replica does not answer: nothing is left."""
    volume = host.name("new")

    def waits():
        if os.path.exists(os.path.join(host.root, "volumes", volume)):
            go_on()
            host.ctl("down", volume)
            host.ctl("rm", volume, "--yes")
        up = Command(host, "up", volume, "--size", "64MiB", "--replicas", "2", "--frontend", "none", terminal=terminal)
        stop(soon("a replica", lambda: process_of(host, "replica")))
        time.sleep(0.5)
        return up

    for sign in STATUS:
        said = caught(waits, sign, within=90)
        expect(f"interrupted: there is no volume {volume}" in said, said)
        expect(made_of(host, volume) == [], f"left: {made_of(host, volume)}")
        if terminal:
            last = [line for line in as_seen(said) if line.strip()]
            expect(len(last) == 1 and last[0].startswith("interrupted:"), f"the terminal shows {last}")
    host.up(volume, "--size", "64MiB", "--replicas", "2", "--frontend", "none")
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")


def a_volume_that_exists(host):
    """It goes on starting, as it does without the command."""
    volume = host.name("there")
    host.up(volume, "--size", "64MiB", "--replicas", "1", "--frontend", "none")

    def waits():
        go_on()
        host.ctl("down", volume)
        up = Command(host, "up", volume)
        stop(soon("a replica", lambda: process_of(host, "replica")))
        time.sleep(0.3)
        return up
    said = caught(waits)
    expect("goes on" in said and f"longhornctl --root {host.root} down {volume}" in said, said)
    go_on()
    host.up(volume)
    host.ctl("down", volume)
    host.ctl("rm", volume, "--yes")


def filled(host, word, size=256, **options):
    """A volume with data in it, which is down."""
    volume = host.name(word)
    host.up(volume, "--size", f"{size}MiB", "--replicas", "2", "--frontend", "nbd-server")
    uri = host.status(volume)["uri"]
    for at in range(0, size, 64):
        subprocess.run(["qemu-io", "-f", "raw", "-c", f"write -P {at % 250 + 1} {at}M 64M", uri], check=True,
                       stdout=subprocess.DEVNULL)
    return volume


def for_one_operation(host, volume):
    """A volume that is down has an engine for one operation, and none afterwards. The volume is down before and after."""
    def folds():
        host.up(volume)
        host.ctl("snapshot", "create", volume, "s1")
        host.ctl("snapshot", "rm", volume, "s1")
        host.ctl("down", volume)
        purge = Command(host, "snapshot", "purge", volume)
        soon("its engine", lambda: process_of(host, "controller") or purge.process.poll() is not None)
        return purge
    said = caught(folds)
    expect(f"volume {volume} is down again" in said, said)
    expect(glob.glob(os.path.join(host.root, "run/processes", volume + "-*")) == [], "its processes go on")
    expect(host.status(volume)["state"] == "detached", host.status(volume)["state"])
    host.ctl("snapshot", "purge", volume)


def a_clone(host, volume):
    """Nothing is left of it."""
    clone = host.name("clone")
    making = Command(host, "clone", volume, clone)
    soon("its record", lambda: os.path.exists(os.path.join(host.root, "volumes", clone, "volume.json")) or making.process.poll() is not None)
    if making.process.poll() is None:
        making.process.send_signal(signal.SIGINT)
        making.process.wait(60)
    text = making.process.communicate()[1].decode()
    if making.process.returncode == 0:
        host.ctl("rm", clone, "--yes")
        return False
    expect(making.process.returncode == 130, f"{making.process.returncode} {text}")
    if "is there, and whole" in text:
        host.ctl("rm", clone, "--yes")
        return False
    expect(f"interrupted: there is no volume {clone}" in text, text)
    expect(made_of(host, clone) == [], f"left: {made_of(host, clone)}")
    return True


def has_open(process, place):
    """True if the process has a file in this directory open, with a name or without."""
    try:
        open_files = [os.readlink(link) for link in glob.glob(f"/proc/{process.pid}/fd/*")]
    except OSError:
        return False
    return any(path.startswith(place + "/") for path in open_files)


def an_export(host, volume):
    """The file is as it was, and there is no other."""
    place = os.path.join(host.root, "images")
    os.makedirs(place, exist_ok=True)
    target = os.path.join(place, "disk.img")
    with open(target, "w") as file:
        file.write("before")
    replica = host.status(volume)["replicas"][0]["path"]
    export = Command(host, "replica", "export", replica, target)
    soon("its file", lambda: has_open(export.process, place) or export.process.poll() is not None)
    if export.process.poll() is None:
        export.process.send_signal(signal.SIGINT)
    text = export.process.communicate(timeout=60)[1].decode()
    expect(os.listdir(place) == ["disk.img"], f"left: {os.listdir(place)}")
    if export.process.returncode == 0 or "is written" in text:
        return False
    expect(export.process.returncode == 130 and f"{target} is as it was" in text, f"{export.process.returncode} {text}")
    expect(open(target).read() == "before", "the file is another")
    return True


def what_an_engine_does(host, volume):
    """It goes on: a scrub, and a replica that is brought in sync."""
    host.up(volume)
    scrub = Command(host, "scrub", volume, "--wait", "--limit", "1MiB")
    wait_for("the scrub", lambda: json.loads(host.ctl("-o", "json", "scrub", volume, "--status", check=False).stdout or "{}").get("running"))
    said = scrub.interrupt()
    expect("goes on" in said and "--cancel" in said, said)
    expect(host.json("scrub", volume, "--status")["running"], "the scrub has ended with its command")
    # The same again waits for the one that runs.
    again = Command(host, "scrub", volume, "--wait")
    expect(b"is waited for" in again.process.stderr.readline(), "a scrub that runs is not waited for")
    host.ctl("scrub", volume, "--cancel")
    again.process.communicate(timeout=60)

    before = {r["name"] for r in host.status(volume)["replicas"]}
    added = lambda: next((r for r in host.status(volume)["replicas"] if r["name"] not in before and r["pid"]), None)

    def joins():
        if added():
            go_on()
            host.healthy(volume, replicas=3)
            host.ctl("replica", "rm", volume, added()["name"])
        adding = Command(host, "replica", "add", volume, terminal=True)
        stop(soon("the new replica", added)["pid"])
        time.sleep(0.3)
        return adding
    said = caught(joins)
    go_on()
    last = [line for line in as_seen(said) if line.strip()]
    expect(last and "goes on" in last[-1], f"{last}")
    host.healthy(volume, replicas=3)
    host.ctl("replica", "rm", volume, added()["name"])


def an_upgrade(host, volume):
    """Once: the command waits until the volume is shown again. Twice: what it names gives the volume an engine, though its own does not
    start."""
    host.up(volume)
    engine = lambda: host.status(volume)["engine_pid"]

    def exchanges():
        nonlocal before
        before = engine()
        upgrade = Command(host, "upgrade", volume)
        soon("the exchange", lambda: not os.path.exists(f"/proc/{before}") or upgrade.process.poll() is not None)
        return upgrade

    before = None
    for sign in STATUS:
        said = caught(exchanges, sign)
        expect("has a new engine" in said and engine() not in (None, before), said)
    place = os.path.join(host.root, "no-engine")
    os.mkdir(place)
    program = os.path.join(place, "longhorn")
    with open(program, "w") as file:
        file.write('#!/bin/sh\n[ "$1" = --version ] && echo longhorn 0.1.0 && exit\nexec sleep 1000\n')
    os.chmod(program, 0o755)
    before = engine()
    upgrade = Command(host, "upgrade", volume, "--binary", program)
    soon("the engine's end", lambda: not os.path.exists(f"/proc/{before}"))
    # Two signals of which the first has not been heard yet are one.
    said = upgrade.in_time(again=0.5)
    expect(said is not None, "it has ended with an engine that does not start")
    expect(f"longhornctl --root {host.root} upgrade {volume}" in said, said)
    expect(host.status(volume)["state"] != "attached", "the program that is no engine shows the volume")
    host.ctl("upgrade", volume)
    host.healthy(volume, replicas=2)


def a_stop(host, volume):
    """While it waits for who uses the device nothing has been told to end, and it says so."""
    host.ctl("down", volume)
    device = os.open(host.up(volume, "--frontend", "auto")["device"], os.O_RDONLY)
    try:
        for words in (("down", volume, "--wait", "60"), ("down", volume, "--for-now", "--wait", "60")):
            down = Command(host, *words, terminal=True)
            wait_for("a word of waiting", lambda: b"nobody uses the device" in down.seen)
            said = [line for line in as_seen(down.interrupt()) if line.strip()]
            expect(said == [f"interrupted: volume {volume} stays up as it was"], f"{said}")
            expect(host.status(volume)["state"] == "attached", "it is stopped")
    finally:
        os.close(device)


def before_a_stop(host, volume):
    """`down` that has asked nobody to end yet."""
    host.up(volume)
    with open(os.path.join(host.root, "run", "volumes", f"{volume}.lock")) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = Command(host, "down", volume)
        time.sleep(1)
        said = command.interrupt()
    expect("stays up as it was" in said and "told to end" not in said, said)
    expect(host.status(volume)["state"] == "attached", "it is being stopped")


def on_a_dumb_terminal(host, volume):
    """One that moves nothing shows lines, as a file does."""
    host.ctl("down", volume)
    before = os.environ.get("TERM", "linux")
    os.environ["TERM"] = "dumb"
    command = Command(host, "up", volume, terminal=True)
    os.environ["TERM"] = before
    expect(command.process.wait(60) == 0, command.seen)
    command.reader.join(10)
    expect("starting the engine\r\n" in command.seen.decode(), f"no progress: {command.seen}")


def a_trim(host, volume):
    """fstrim ends with the command that started it, whichever of the two the signal is for."""
    device, mount, place = host.status(volume)["device"], os.path.join(host.root, "mount"), os.path.join(host.root, "bin")
    os.mkdir(mount)
    os.mkdir(place)
    # One that takes its time.
    fstrim = os.path.join(place, "fstrim")
    with open(fstrim, "w") as file:
        file.write("#!/bin/sh\nexec sleep 1000\n")
    os.chmod(fstrim, 0o755)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-E", "nodiscard", device], check=True)
    subprocess.run(["mount", device, mount], check=True)
    path = os.environ["PATH"]
    try:
        os.environ["PATH"] = f"{place}:{path}"
        for sign in STATUS:
            trim = Command(host, "trim", "volume", volume)
            children = lambda: open(f"/proc/{trim.process.pid}/task/{trim.process.pid}/children").read().split()
            child = soon("fstrim", children)[0]
            said = trim.interrupt(sign)
            expect("interrupted: what was given back already is" in said, said)
            wait_for("the end of fstrim", lambda: not os.path.exists(f"/proc/{child}"))
    finally:
        os.environ["PATH"] = path
        subprocess.run(["umount", mount], check=True)


def twice(host, volume):
    """An operation on a stopped volume that was not given the time to stop it again is given again."""
    host.ctl("down", volume)
    wanted = host.status(volume)["size"]

    def ends():
        nonlocal wanted
        wanted += 1 << 20
        resize = Command(host, "resize", volume, str(wanted))
        # Its engine is told to end at the first signal, and is not waited for after the second.
        soon("its engine", lambda: process_of(host, "controller") or resize.process.poll() is not None)
        resize.process.send_signal(signal.SIGINT)
        time.sleep(0.01 * step)
        return resize

    for step in range(1, 4):
        caught(ends)
        host.ctl("resize", volume, str(wanted))
        expect(host.status(volume)["size"] == wanted, "it has another size")
        expect(host.status(volume)["engine_pid"] is None, "it is not stopped again")


def a_salvage(host, volume):
    """Once it is decided, `up` goes on with it."""
    def waits():
        go_on()
        host.ctl("down", volume)
        salvage = Command(host, "salvage", volume)
        stop(soon("a replica", lambda: process_of(host, "replica")))
        return salvage
    said = caught(waits)
    go_on()
    expect(f"longhornctl --root {host.root} up {volume}" in said, said)
    host.up(volume)
    host.healthy(volume, replicas=2)
    host.ctl("down", volume)


def an_import(host, volume):
    """Interrupted anywhere, `release` and `import` are given again, or have been done."""
    directories = [r["path"] for r in host.status(volume)["replicas"]]
    for milliseconds in range(0, 40, 4):
        for words in (("release", volume), ("import", volume, *directories)):
            there = lambda: volume in [v["name"] for v in host.json("ls")]
            begun = Command(host, *words)
            time.sleep(milliseconds / 1000)
            if begun.process.poll() is None:
                begun.process.send_signal(signal.SIGINT)
            begun.process.communicate(timeout=60)
            if there() != (words[0] == "import"):
                host.ctl(*words)
    host.up(volume)
    host.healthy(volume, replicas=2)


def who_only_looks(host, volume):
    watch = Command(host, "status", volume, "--watch", terminal=True)
    wait_for("a page", lambda: b"REPLICA" in watch.seen)
    said = watch.interrupt()
    expect("interrupted" not in said and "error" not in said, said)
    host.ctl("down", volume)
    asked = Command(host, "rm", volume, terminal=True)
    wait_for("the question", lambda: b"Type the volume's name" in asked.seen)
    expect("interrupted: nothing was deleted" in asked.interrupt(), "no word of what was deleted")
    expect(host.status(volume)["state"] == "detached", "it is deleted")


def in_the_background(host, volume):
    """What whoever started it has it ignore stays ignored."""
    line = [os.path.join(BIN, "longhornctl"), "--root", host.root, "status", volume, "--watch"]
    watch = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
    expect(watch.stdout.readline(), "it says nothing")
    watch.send_signal(signal.SIGINT)
    time.sleep(0.5)
    expect(watch.poll() is None, "it heard what it was told to ignore")
    watch.send_signal(signal.SIGTERM)
    watch.communicate(timeout=20)
    expect(watch.returncode == 143, f"exit status {watch.returncode}")


def main():
    host = Host()
    a_new_volume(host, terminal=False)
    a_new_volume(host, terminal=True)
    a_volume_that_exists(host)
    shown("up: a new volume is taken back, another goes on")
    volume = filled(host, "filled")
    for_one_operation(host, volume)
    caught = [sum(story(host, volume) for _ in range(5)) for story in (a_clone, an_export)]
    expect(all(caught), f"never interrupted in the middle: {caught}")
    what_an_engine_does(host, volume)
    an_upgrade(host, volume)
    a_stop(host, volume)
    before_a_stop(host, volume)
    on_a_dumb_terminal(host, volume)
    a_trim(host, volume)
    twice(host, volume)
    a_salvage(host, volume)
    an_import(host, volume)
    shown("upgrade, down --wait, trim, resize twice, salvage, release, import: said, and given again")
    who_only_looks(host, volume)
    in_the_background(host, volume)
    host.ctl("rm", volume, "--yes")
    shown(f"purge, clone ({caught[0]} of 5 in the middle), export ({caught[1]} of 5), scrub, replica add, watch, rm: said, and nothing left")


main()
