"""open-iscsi for the iSCSI scenarios: the machine's own, or in a guest the distribution's packages, unpacked over the
guest's view of this machine, which is gone when it ends."""
import glob, os, shutil, subprocess, tempfile, time

PACKAGES = os.environ.get("LH_GUEST_PACKAGES", "")
CONFIGURATION = "/etc/iscsi/initiatorname.iscsi"


def unpack():
    if os.environ.get("LH_GUEST") != "1" or shutil.which("iscsiadm"):
        return
    beside = tempfile.mkdtemp(dir="/dev/shm")
    for package in glob.glob(os.path.join(PACKAGES, "*.deb")):
        subprocess.run(["dpkg-deb", "-x", package, beside], check=True)
    # /sbin is a link to /usr/sbin, or it is not: the programs are found in both.
    for part, place in (("usr", "/usr"), ("sbin", "/usr/sbin"), ("etc", "/etc")):
        if os.path.isdir(os.path.join(beside, part)):
            subprocess.run(["cp", "-a", os.path.join(beside, part) + "/.", place], check=True)
    shutil.rmtree(beside)


def ready():
    """Why there is no initiator here; None if there is one, and iscsid runs."""
    unpack()
    if not shutil.which("iscsiadm"):
        return "no open-iscsi (iscsiadm), and no package of it"
    if not os.path.exists("/sys/class/iscsi_transport/tcp"):
        subprocess.run(["modprobe", "-q", "iscsi_tcp"], capture_output=True)
    if not os.path.exists("/sys/class/iscsi_transport/tcp"):
        return "this kernel has no iSCSI initiator"
    if subprocess.run(["pidof", "iscsid"], capture_output=True).returncode == 0:
        return None
    if not os.path.exists(CONFIGURATION):
        with open(CONFIGURATION, "w") as file:
            file.write("InitiatorName=iqn.2019-10.io.longhorn:guest\n")
    os.makedirs("/run/lock/iscsi", exist_ok=True)
    subprocess.Popen(["iscsid", "-f"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                     start_new_session=True)
    until = time.monotonic() + 30
    while subprocess.run(["iscsiadm", "-m", "session"], capture_output=True).returncode not in (0, 21):
        if time.monotonic() > until:
            return "iscsid does not answer"
        time.sleep(0.1)
    return None
