"""The Dockerfile, built by buildah without a registry, beside what scripts/image writes: the same files with the same modes and
owners, the same configuration, and every program starts. The base is made here, of this machine's own Debian packages and
toolchain and with nothing that the Dockerfile says it installs. Needs root, and crates and packages as any build does.

    tests/image/dockerfile.py [PROGRAMS]    the folder with longhorn and longhornctl for scripts/image (target/release)
"""
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile

from check import TREE, fail, starts, unpack

# What is compared is which files there are: nobody waits for fast ones.
BASE = """FROM scratch
ADD root.tar /
ENV PATH=/usr/local/cargo/bin:/usr/sbin:/usr/bin:/sbin:/bin CARGO_HOME=/usr/local/cargo
ENV CARGO_PROFILE_RELEASE_OPT_LEVEL=0 CARGO_PROFILE_RELEASE_DEBUG=0
"""
TRUST = "/etc/ssl/certs/ca-certificates.crt"
APT = [f"/etc/apt/sources.list.d/{name}.sources" for name in ("debian", "ubuntu")] + ["/etc/apt/sources.list"]


def skip(why):
    print(f"SKIP dockerfile: {why}")
    sys.exit(0)


def run(*command, **more):
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, **more)
    if done.returncode != 0:
        fail(f"{' '.join(command)}: status {done.returncode}")
    return done.stdout.strip()


def codename():
    """The distribution's release, as its archive calls it."""
    lines = open("/etc/os-release").read().splitlines()
    return next((line.partition("=")[2].strip('"') for line in lines if line.startswith("VERSION_CODENAME=")), "")


def base(path):
    """A root directory as a tar file: a distribution with nothing in it but apt, and the toolchain, as Rust's image has it."""
    sources = next(filter(os.path.exists, APT), None) or skip(f"none of {', '.join(APT)}: no packages")
    toolchain = run("rustc", "--print", "sysroot", cwd=TREE)
    copies = [(f"{toolchain}/bin", "/usr/local/cargo"), (f"{toolchain}/lib", "/usr/local/cargo")]
    # Crates come over HTTPS, from whom this machine believes.
    copies += [(TRUST, os.path.dirname(TRUST))] if os.path.exists(TRUST) else []
    hooks = [f'--customize-hook=mkdir -p "$1"{to} && cp -a {source} "$1"{to}' for source, to in copies]
    run("mmdebstrap", "--variant=minbase", *hooks, codename(), path, sources)


class Buildah:
    """Images and containers in a folder of their own, without namespaces."""

    def __init__(self, folder):
        self.command = ["buildah", "--root", f"{folder}/images", "--runroot", f"{folder}/run"]

    def __call__(self, *arguments):
        return run(*self.command, *arguments)

    def build(self, name, context, *arguments):
        self("build", "--isolation", "chroot", "--tag", name, *arguments, context)

    def image(self, name):
        """(the configuration, where its files are)"""
        config = json.loads(self("inspect", "--type", "image", name))["OCIv1"]["config"]
        return config, self("mount", self("from", "--pull-never", name))


def files(root):
    """What is below a directory: by its path, kind, mode, owner and, of a link, where it points."""
    found = {}
    for place, directories, names in os.walk(root):
        for path in (os.path.join(place, name) for name in directories + names):
            meta = os.lstat(path)
            target = os.readlink(path) if stat.S_ISLNK(meta.st_mode) else ""
            found[os.path.relpath(path, root)] = (stat.filemode(meta.st_mode), meta.st_uid, meta.st_gid, target)
    return found


def compare(built, written):
    differ = sorted(path for path in built.keys() | written.keys() if built.get(path) != written.get(path))
    for path in differ:
        print(f"{path}: the Dockerfile's {built.get(path)}, scripts/image's {written.get(path)}", file=sys.stderr)
    if differ:
        fail(f"{len(differ)} files differ")


def settings(config):
    """What a container runtime goes by. Who built an image may add labels of its own."""
    keys = ("User", "ExposedPorts", "Env", "Entrypoint", "Cmd", "Volumes", "WorkingDir", "StopSignal")
    return {key: config[key] for key in keys if config.get(key)}


def main():
    programs = sys.argv[1] if len(sys.argv) > 1 else f"{TREE}/target/release"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        context = f"{scratch}/base"
        os.mkdir(context)
        base(f"{context}/root.tar")
        with open(f"{context}/Dockerfile", "w") as out:
            out.write(BASE)
        buildah = Buildah(scratch)
        try:
            buildah.build("localhost/base", context)
            shutil.rmtree(context)
            buildah.build("localhost/longhorn", TREE, "--build-arg", "BASE=localhost/base")
            config, place = buildah.image("localhost/longhorn")
            archive, written = f"{scratch}/longhorn.tar", f"{scratch}/written"
            run(f"{TREE}/scripts/image", "--output", archive, "--programs", programs)
            expected, _ = unpack(archive, written)
            if settings(config) != settings(expected["config"]):
                fail(f"the Dockerfile's configuration is {settings(config)}, scripts/image's {settings(expected['config'])}")
            found = files(place)
            compare(found, files(written))
            starts(place, config)
        finally:
            buildah("rm", "--all")
            buildah("rmi", "--all", "--force")
    print(f"SHOWN the Dockerfile gives what scripts/image writes: {len(found)} files, and every program starts")


if __name__ == "__main__":
    if os.geteuid() != 0:
        skip("chroot needs root")
    for tool in ("buildah", "mmdebstrap"):
        shutil.which(tool) or skip(f"no {tool} (its package has the same name)")
    codename() or skip("this is no Debian or Ubuntu")
    main()
