#!/usr/bin/env python3
"""Writes fuzz/corpus/iscsi: sessions of an initiator as RFC 7143 and the SCSI standards describe them, by hand.

Each is the target's byte of circumstances (src/iscsi.rs), then PDUs.
"""
import struct
from pathlib import Path

TARGET, NAME = "iqn.2014-09.io.longhorn:demo", "iqn.2020-01.test:initiator"
ISID = bytes.fromhex("00023d000000")


def pdu(opcode, flags, lun_or_isid, itt, rest, data=b"", own=b"\0\0"):
    head = struct.pack(">BB2sB3s8sI", opcode, flags, own, 0, len(data).to_bytes(3, "big"), lun_or_isid, itt) + rest
    assert len(head) == 48, len(head)
    return head + data + bytes(-len(data) % 4)


def login(stage, following, keys, itt=1):
    text = b"".join(f"{k}={v}".encode() + b"\0" for k, v in keys)
    flags = stage << 2 | (0x80 | following if following is not None else 0)
    rest = struct.pack(">H2xII", 1, 1, 1) + bytes(16)
    return pdu(0x43, flags, ISID + b"\0\0", itt, rest, text)


WHO = [("InitiatorName", NAME), ("TargetName", TARGET), ("SessionType", "Normal")]
KEYS = [("HeaderDigest", "None,CRC32C"), ("DataDigest", "None"), ("MaxRecvDataSegmentLength", 262144),
        ("MaxBurstLength", 1048576), ("FirstBurstLength", 65536), ("InitialR2T", "No"), ("ImmediateData", "Yes"),
        ("MaxOutstandingR2T", 1), ("DefaultTime2Wait", 2), ("DefaultTime2Retain", 20), ("ErrorRecoveryLevel", 0),
        ("MaxConnections", 1), ("DataPDUInOrder", "Yes"), ("DataSequenceInOrder", "Yes"), ("X-com.example", "what")]


class Commands:
    def __init__(self, first):
        self.number, self.itt = first, 16

    def scsi(self, cdb, expected=0, data=b"", lun=1, flags=None):
        flags = flags if flags is not None else 0x81 | (0x40 if expected and not data else 0) | (0x20 if data else 0)
        rest = struct.pack(">III16s", expected or len(data), self.number, 1, cdb.ljust(16, b"\0"))
        self.number, self.itt = self.number + 1, self.itt + 1
        return pdu(0x01, flags, struct.pack(">HHHH", lun, 0, 0, 0), self.itt, rest, data)

    def other(self, opcode, flags, data=b"", rest=b""):
        rest = (struct.pack(">III", 0xFFFFFFFF, self.number, 1) + rest).ljust(28, b"\0")
        self.number += 1
        return pdu(opcode, flags, bytes(8), self.itt, rest, data)


def everything(first):
    c = Commands(first)
    b = bytes.fromhex
    reads = [("00", 0), ("120000006000", 96), ("12018300ff00", 255), ("1201b000ff00", 255), ("1201b200ff00", 255),
             ("a00000000000000000ff0000", 255), ("2500000000000000" "0000", 8), ("9e10" + "00" * 11 + "200000", 32),
             ("1a003f00ff00", 255), ("5a003f00000000" "00ff00", 255), ("28000000000000000800", 4096),
             ("880000000000000000000000000800" "00", 4096), ("080000000800", 4096), ("9e12" + "00" * 11 + "ff0000", 255),
             ("5e000000000000" "00ff00", 255), ("5e020000000000" "00ff00", 255), ("a30c00000000000000ff0000", 255),
             ("0300000012" "00", 18)]
    out = [c.scsi(b(cdb), expected) for cdb, expected in reads]
    block = bytes(range(256)) * 2
    writes = [("2a000000000000000100", block), ("8a" + "00" * 12 + "010000"[:6], block), ("8900" + "00" * 11 + "010000", block * 2),
              ("4100" + "00000010" + "00" + "0008" + "00", block), ("9300" + "00" * 11 + "080000", block),
              ("4200000000000000" "1800", struct.pack(">HHIQII", 22, 16, 0, 8, 8, 0)),
              ("5f000000000000001800", struct.pack(">QQII", 0, 7, 0, 0)), ("5f010100000000001800", struct.pack(">QQII", 7, 0, 0, 0)),
              ("5f050100000000001800", struct.pack(">QQII", 7, 9, 0, 0)), ("1510000018" "00", bytes(4) + b"\x08\x12\x04" + bytes(17)),
              ("2e020000000000000100", block), ("2f020000000000000100", block)]
    out += [c.scsi(b(cdb), len(data), data) for cdb, data in writes]
    out += [c.scsi(b("35000000000000000000")), c.scsi(b("1b0000000100")), c.scsi(b("ff")), c.scsi(b("00"), lun=5)]
    out.append(c.other(0x00, 0x80, b"ping"))
    out.append(c.other(0x02, 0x81))
    out.append(c.other(0x04, 0x80, b"SendTargets=All\0"))
    out.append(c.other(0x10, 0x80))
    out.append(c.other(0x06, 0x80))
    return b"".join(out)


def main():
    place = Path(__file__).parent / "corpus" / "iscsi"
    place.mkdir(parents=True, exist_ok=True)
    both = login(0, 1, WHO + [("AuthMethod", "CHAP,None")]) + login(1, 3, KEYS)
    discovery = login(1, 3, [("InitiatorName", NAME), ("SessionType", "Discovery")] + KEYS[:3])
    chap = (login(0, None, WHO + [("AuthMethod", "CHAP")]) + login(0, None, [("CHAP_A", "7,5")])
            + login(0, 1, [("CHAP_N", "user"), ("CHAP_R", "0x" + "ab" * 32), ("CHAP_I", 9), ("CHAP_C", "0x" + "cd" * 16)]))
    seeds = {"login-direct": b"\0" + login(1, 3, WHO + KEYS) + everything(1)[:2048],
             "login-stages": b"\0" + both + everything(1)[:1024],
             "login-chap": b"\1" + chap,
             "login-closed": b"\4" + login(1, 3, WHO + KEYS),
             "discovery": b"\0" + discovery + Commands(1).other(0x04, 0x80, b"SendTargets=All\0"),
             "session": b"\2" + everything(1),
             "session-read-only-4096": b"\x1a" + everything(1)}
    for name, data in seeds.items():
        (place / name).write_bytes(data[:8192])


main()
