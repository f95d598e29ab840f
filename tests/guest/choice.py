"""What `auto` takes on this kernel, and why (docs/decisions/0015): the real driver is asked, and judged by the kernel's version,
which the programs do not look at.

    choice.py
"""
import json
from devices import expect, kernel_is, shown, wait_for
from volumes import Volume, taken_by_auto


def finding(host, check):
    """What the doctor says, who may find other things that do not work here."""
    said = json.loads(host.ctl("-o", "json", "doctor", check=False).stdout)
    return next(found for found in said if found["check"] == check)


def main():
    sound, expected = kernel_is(6, 16), taken_by_auto()
    disk = Volume("auto", size=64 << 20, shown_by=expected)
    said = finding(disk.host, "ublk")
    expect(said["verdict"] == ("OK" if sound else "WARN"), f"ublk: {said}")
    expect(sound or "6.16" in said["next"], f"ublk: {said}")
    chosen = finding(disk.host, "device")
    expect(f"auto is {expected} " in chosen["detail"], f"{chosen}")
    # It is decided once: the next engine takes the device over, whatever it would choose.
    device = disk.numbers
    disk.kill()
    disk.restart()
    again = wait_for("the volume is shown again", lambda: disk.host.status(disk.volume)["device"] and
                     disk.host.status(disk.volume))
    expect((again["frontend"], disk.device_numbers()) == (expected, device), f"{again['frontend']} on {disk.device_numbers()}")
    disk.stop()
    # Who asks for it has it.
    asked = Volume("ublk", size=64 << 20)
    asked.stop()
    shown(f"auto is {expected}; ublk's driver is {'sound' if sound else 'fragile, and there for who asks'}")


main()
