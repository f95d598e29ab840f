#!/usr/bin/env python3
"""An image of one static program, for a test's containerd: image.py FILE NAME PROGRAM [LINK...]

Writes a docker-archive, which `ctr images import` reads. The program is /bin/PROGRAM and runs with the container's
arguments; with links it is a program of many names, as busybox, and the container names one.
"""
import hashlib
import io
import json
import os
import sys
import tarfile


def tar(members):
    """A tar file of (name, mode, bytes or, for a link, a text)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, mode, what in members:
            entry = tarfile.TarInfo(name)
            entry.mode = mode
            if isinstance(what, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, what
                archive.addfile(entry)
            elif what is None:
                entry.type = tarfile.DIRTYPE
                archive.addfile(entry)
            else:
                entry.size = len(what)
                archive.addfile(entry, io.BytesIO(what))
    return out.getvalue()


def main():
    path, name, program, *links = sys.argv[1:]
    own = os.path.basename(program)
    directories = [(d, mode, None) for d, mode in (("bin", 0o755), ("tmp", 0o1777), ("dev", 0o755), ("data", 0o755))]
    layer = tar(directories + [(f"bin/{own}", 0o755, open(program, "rb").read())] + [(f"bin/{l}", 0o777, own) for l in links])
    run = {"Cmd": ["sleep", "infinity"]} if links else {"Entrypoint": [f"/bin/{own}"]}
    config = {
        "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
        "os": "linux",
        "config": {"Env": ["PATH=/bin"], **run},
        "rootfs": {"type": "layers", "diff_ids": ["sha256:" + hashlib.sha256(layer).hexdigest()]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with open(path, "wb") as archive:
        archive.write(tar([
            ("config.json", 0o644, json.dumps(config).encode()),
            ("layer.tar", 0o644, layer),
            ("manifest.json", 0o644, json.dumps(manifest).encode()),
        ]))


main()
