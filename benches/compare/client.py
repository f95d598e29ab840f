"""The client of every contestant: one fio process, and what it says of a run."""
import dataclasses, json, subprocess, time

from . import machine


class BenchError(Exception):
    """A measurement could not be made; the text says why."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a client does."""
    key: str
    name: str
    args: tuple
    writes: bool


def workload(key, name, rw, block, depth):
    return Workload(key, name, (f"--rw={rw}", f"--bs={block}", f"--iodepth={depth}"), "write" in rw)


WRITE_1 = workload("write-4k-1", "4 KiB write, depth 1", "randwrite", "4k", 1)
WRITE_32 = workload("write-4k-32", "4 KiB write, depth 32", "randwrite", "4k", 32)
READ_1 = workload("read-4k-1", "4 KiB read, depth 1", "randread", "4k", 1)
READ_32 = workload("read-4k-32", "4 KiB read, depth 32", "randread", "4k", 32)
WRITE_1M = workload("write-1m-8", "1 MiB write, depth 8", "write", "1m", 8)
FILL = workload("fill", "fill", "write", "1m", 4)


@dataclasses.dataclass
class Target:
    """What fio reads and writes: arguments of each job; a request of the contestant is one to each of them."""
    jobs: list


@dataclasses.dataclass
class Sample:
    """One run. Times in microseconds; processor time is per I/O."""
    iops: float
    mib_s: float
    mean: float
    p50: float
    p99: float
    p999: float
    cpu: float
    machine: float


def file_job(path):
    return ["--ioengine=io_uring", "--direct=1", f"--filename={path}"]


def nbd_job(uri):
    return ["--ioengine=nbd", f"--uri={uri}"]


def command(target, work, size, runtime=None):
    """The command line of a run; without a runtime it goes once over all of the size."""
    words = ["fio", "--output-format=json", "--group_reporting", "--thread", "--randrepeat=0", "--norandommap",
             "--percentile_list=50:99:99.9", f"--size={size}", *work.args]
    if runtime:
        words += ["--time_based", f"--runtime={int(runtime * 1000)}ms"]
    for number, job in enumerate(target.jobs):
        words += [f"--name=job{number}", *job]
    return words


def run(target, work, size, pids=(), runtime=None):
    """Runs fio on the target; `pids` are the servers whose time counts."""
    before, all_before = machine.cpu_of(pids), machine.cpu_of_all()
    done = subprocess.run(command(target, work, size, runtime), capture_output=True, text=True, cwd="/tmp",
                          timeout=(runtime or 0) * 4 + 600)
    servers, everybody = machine.cpu_of(pids) - before, machine.cpu_of_all() - all_before
    if done.returncode != 0 or "{" not in done.stdout:
        raise BenchError(f"fio: status {done.returncode}: {(done.stderr or done.stdout).strip()[-600:]}")
    job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]
    side = job["write" if work.writes else "read"]
    width = len(target.jobs)
    count = side["total_ios"] / width
    if not count:
        raise BenchError("fio did not one request")
    client = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    latency = side["clat_ns"].get("percentile", {})
    part = lambda key: latency.get(key, 0) / 1000
    return Sample(side["iops"] / width, side["bw_bytes"] / width / 2**20, side["lat_ns"]["mean"] / 1000,
                  part("50.000000"), part("99.000000"), part("99.900000"),
                  (client + servers) / count * 1e6, everybody / count * 1e6)


def settle():
    """A moment for what a run has left behind: sockets close, workers end."""
    time.sleep(0.05)
