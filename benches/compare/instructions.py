"""Instructions per I/O of the state machines: counted, and compared with what is kept in benches/instructions.json."""
import json, os, re, shutil, subprocess, sys, tempfile

from . import ours

FILE = os.path.join(ours.TOP, "benches", "instructions.json")

# A change by less than this is no news: what the compiler moved about.
TOLERANCE = 0.05

# Each case is done so many times and then more: the difference is free of start-up.
FEW, MANY = 320, 3_200


def tools():
    """How instructions can be counted here: by the processor's counter if it has one, and by callgrind."""
    found = []
    if shutil.which("perf"):
        done = subprocess.run(["perf", "stat", "-x,", "-e", "instructions:u", "true"], capture_output=True, text=True)
        if done.returncode == 0 and re.search(r"^\d+,", done.stderr, re.M):
            found.append("perf")
    if shutil.which("valgrind"):
        found.append("callgrind")
    return found


def count(how, program, case, times):
    words = [program, case, str(times)]
    if how == "perf":
        done = subprocess.run(["perf", "stat", "-x,", "-e", "instructions:u", *words], capture_output=True, text=True)
        found = re.search(r"^(\d+),", done.stderr, re.M)
    else:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out", *words],
                                  capture_output=True, text=True)
        found = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode != 0 or not found:
        sys.exit(f"scripts/bench: {' '.join(words)} under {how}: status {done.returncode}\n{done.stderr[-2000:]}")
    return int(found.group(1))


def run(update):
    """Prints a table; 0 if every count is within the tolerance of the one that is kept."""
    can = tools()
    if not can:
        print("SKIP instructions: neither a processor's counter nor valgrind is here")
        return 0
    program = os.path.join(ours.BIN, "count-instructions")
    cases = subprocess.run([program, "--list"], capture_output=True, text=True, check=True).stdout.splitlines()
    kept = json.load(open(FILE)) if os.path.exists(FILE) else {}
    # What nothing is kept of compares nothing.
    how = can[0] if update else next((one for one in can if kept.get(one)), can[0])
    known, found, wrong = kept.get(how, {}), {}, []
    print(f"instructions per I/O, by {how}")
    for case in cases:
        one = (count(how, program, case, FEW + MANY) - count(how, program, case, FEW)) / MANY
        found[case] = round(one)
        before = known.get(case)
        change = f"{one / before - 1:+.1%}" if before else "new"
        print(f"  {case:36} {one:8.0f}   kept {before or '-':>6}   {change}", flush=True)
        if not update and (not before or abs(one / before - 1) > TOLERANCE):
            wrong.append(f"{case}: {one:.0f}, kept {before or 'nothing'}")
    gone = sorted(set(known) - set(cases))
    if update:
        kept[how] = found
        with open(FILE, "w") as f:
            json.dump(kept, f, indent=1)
            f.write("\n")
        return 0
    if not known:
        print(f"SKIP instructions: {os.path.relpath(FILE)} has no counts by {how}; scripts/bench --instructions --update")
        return 0
    wrong += [f"{case}: kept, but there is no such case" for case in gone]
    if wrong:
        print(f"NOT AS KEPT (tolerance {TOLERANCE:.0%}); if that is meant: scripts/bench --instructions --update")
        print("\n".join(f"  {w}" for w in wrong))
    else:
        print(f"SHOWN {len(cases)} counts of instructions per I/O as kept, by {how}")
    return 1 if wrong else 0
