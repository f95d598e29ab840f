//! Other people's initiators as judges: libiscsi's conformance suite, its tools, and QEMU. The suite is run against Longhorn's own
//! target daemon, tgtd, too: what that passes over may be passed over here. What is not installed is said with a line
//! `SKIP name: reason`.
//!
//! `cargo test --test judge -- --nocapture` prints the table of `docs/formats/iscsi.md`.

mod support;

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use iscsi_frontend::{Chap, Credentials};
use lh_block::Geometry;
use support::{GEOMETRY, PATIENCE, Running, SIZE, Setup};

/// Families of `iscsi-test-cu` (libiscsi 1.19).
const FAMILIES: &[&str] = &[
    "CompareAndWrite",
    "ExtendedCopy",
    "GetLBAStatus",
    "Inquiry",
    "Mandatory",
    "ModeSense6",
    "NoMedia",
    "OrWrite",
    "Prefetch10",
    "Prefetch16",
    "PreventAllow",
    "PrinReadKeys",
    "PrinServiceactionRange",
    "PrinReportCapabilities",
    "ProutRegister",
    "ProutReserve",
    "ProutClear",
    "ProutPreempt",
    "Read6",
    "Read10",
    "Read12",
    "Read16",
    "ReadCapacity10",
    "ReadCapacity16",
    "ReadDefectData10",
    "ReadDefectData12",
    "ReadOnly",
    "ReceiveCopyResults",
    "ReportSupportedOpcodes",
    "Reserve6",
    "Sanitize",
    "StartStopUnit",
    "TestUnitReady",
    "Unmap",
    "Verify10",
    "Verify12",
    "Verify16",
    "Write10",
    "Write12",
    "Write16",
    "WriteAtomic16",
    "WriteSame10",
    "WriteSame16",
    "WriteVerify10",
    "WriteVerify12",
    "WriteVerify16",
    "iSCSIcmdsn",
    "iSCSIdatasn",
    "iSCSIResiduals",
    "iSCSITMF",
    "MultipathIO",
];

/// What a test has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Skipped,
}

fn installed(program: &str, package: &str) -> bool {
    let found =
        Command::new(program).arg("--help").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok();
    if !found {
        println!("SKIP {program}: not installed (Debian package {package})");
    }
    found
}

/// Runs a family against these addresses: its tests and their verdicts, and all that was said.
fn run(family: &str, urls: &[String]) -> (Vec<(String, Verdict)>, String) {
    let output = Command::new("timeout")
        .args(["600", "iscsi-test-cu", "--dataloss", "--verbose", "--test", &format!("ALL.{family}")])
        .args(urls)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let (tests, summary) = text.split_once("Run Summary").unwrap_or((&text, ""));
    let mut verdicts = Vec::new();
    for test in tests.split("\n  Test: ").skip(1) {
        let name = test.split(' ').next().unwrap_or("").to_owned();
        let verdict = if test.contains("\n    1. ") || summary.is_empty() {
            Verdict::Failed
        } else if test.contains("[SKIPPED]") {
            Verdict::Skipped
        } else {
            Verdict::Passed
        };
        verdicts.push((name, verdict));
    }
    (verdicts, text)
}

/// A family against a disk, which is reached by two paths where the family is about that.
fn judge(family: &str, url: String) -> (Vec<(String, Verdict)>, String) {
    let paths = if family == "MultipathIO" { 2 } else { 1 };
    run(family, &vec![url; paths])
}

/// tgtd over files, a target for each family.
struct Tgtd {
    process: Child,
    /// Told from other daemons of this machine.
    number: String,
    port: u16,
    disks: tempfile::TempDir,
}

impl Tgtd {
    fn start() -> Option<Self> {
        if !installed("tgtd", "tgt") {
            return None;
        }
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP tgtd: not root");
            return None;
        }
        Some((0..10).find_map(|_| Self::try_start()).expect("a port for tgtd"))
    }

    /// `None`: another program has taken the port meanwhile. tgtd goes on without it, and is another one's at this port.
    fn try_start() -> Option<Self> {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        // It takes five digits, the first of them up to 3.
        let number = (port % 32_000).to_string();
        let portal = format!("portal=127.0.0.1:{port}");
        let mut command = Command::new("tgtd");
        command.args(["-f", "-C", &number, "--iscsi", &portal]);
        let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let process = quiet.spawn().unwrap();
        let mut tgtd = Self { process, number, port, disks: tempfile::tempdir().unwrap() };
        let until = Instant::now() + PATIENCE;
        while !tgtd.admin(&["--op", "show", "--mode", "target"]) {
            let ended = tgtd.process.try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < until, "tgtd does not answer, {ended:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        let portals = tgtd.tgtadm(&["--op", "show", "--mode", "portal"]).output().unwrap();
        let listens = String::from_utf8_lossy(&portals.stdout).contains(&format!("127.0.0.1:{port},"));
        listens.then_some(tgtd)
    }

    fn tgtadm(&self, words: &[&str]) -> Command {
        let mut command = Command::new("tgtadm");
        command.args(["-C", &self.number, "--lld", "iscsi"]).args(words);
        command
    }

    fn admin(&self, words: &[&str]) -> bool {
        self.tgtadm(words).output().is_ok_and(|done| done.status.success())
    }

    /// Makes the disk for the family with this number, as large as ours, and as thin.
    fn disk(&self, number: usize) -> String {
        let (tid, name) = (number.to_string(), format!("iqn.2001-04.test:{number}"));
        let file = self.disks.path().join(&tid);
        File::create(&file).unwrap().set_len(SIZE).unwrap();
        let file = file.to_str().unwrap();
        let unit = ["--mode", "logicalunit", "--tid", &tid, "--lun", "1"];
        for (words, more) in [
            (&["--op", "new", "--mode", "target", "--tid", &tid][..], &["-T", &name][..]),
            (&[&["--op", "new"][..], &unit].concat(), &["-b", file]),
            (&[&["--op", "update"][..], &unit].concat(), &["--params", "thin_provisioning=1"]),
            (&["--op", "bind", "--mode", "target", "--tid", &tid], &["-I", "ALL"]),
        ] {
            assert!(self.admin(&[words, more].concat()), "tgtadm {words:?} {more:?}");
        }
        format!("iscsi://127.0.0.1:{}/{name}/1", self.port)
    }
}

impl Drop for Tgtd {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Passed, failed and skipped.
fn count(verdicts: &[(String, Verdict)]) -> [usize; 3] {
    [Verdict::Passed, Verdict::Failed, Verdict::Skipped]
        .map(|wanted| verdicts.iter().filter(|(_, verdict)| *verdict == wanted).count())
}

/// What is wrong with a family's verdicts here. Beside tgtd: with it a test is skipped only if it is there, too; and the counts
/// of both.
fn complaints(
    number: usize,
    may_fail: &[&str],
    tgtd: Option<&Tgtd>,
) -> (Vec<String>, Option<[[usize; 3]; 2]>) {
    let family = FAMILIES[number];
    let server = Running::start();
    let (verdicts, text) = judge(family, server.url());
    if verdicts.is_empty() {
        return (vec![format!("{family}: no test was run:\n{text}")], None);
    }
    let theirs = tgtd.map(|tgtd| judge(family, tgtd.disk(number + 1)).0);
    let mut wrong = Vec::new();
    for (test, verdict) in &verdicts {
        let is_skipped_there =
            |theirs: &Vec<(String, Verdict)>| theirs.contains(&(test.clone(), Verdict::Skipped));
        let complaint = match verdict {
            Verdict::Failed => !may_fail.contains(&test.as_str()),
            Verdict::Skipped => !theirs.as_ref().is_none_or(is_skipped_there),
            Verdict::Passed => false,
        };
        if complaint {
            wrong.push(format!("{family}.{test} {verdict:?}\n{text}"));
        }
    }
    (wrong, theirs.map(|theirs| [count(&theirs), count(&verdicts)]))
}

/// As in `docs/formats/iscsi.md`: families in which one of the two does not pass everything, unless both skip all of it.
fn print_table(counts: &BTreeMap<usize, [[usize; 3]; 2]>) {
    let cell = |[passed, failed, skipped]: [usize; 3]| format!("{passed} / {failed} / {skipped}");
    println!("| family | tgtd | here |\n|---|---|---|");
    let mut all = [[0; 3]; 2];
    for (number, both) in counts {
        all.iter_mut().zip(both).for_each(|(sum, one)| sum.iter_mut().zip(one).for_each(|(s, n)| *s += n));
        let is_dull = |[passed, failed, skipped]: &[usize; 3]| (*failed, passed.min(skipped)) == (0, &0);
        if !(both[0] == both[1] && is_dull(&both[0])) {
            println!("| {} | {} | {} |", FAMILIES[*number], cell(both[0]), cell(both[1]));
        }
    }
    println!("| all {} | {} | {} |", counts.len(), cell(all[0]), cell(all[1]));
}

#[test]
fn libiscsi_finds_nothing() {
    if !installed("iscsi-test-cu", "libiscsi-bin") {
        return;
    }
    let tgtd = Tgtd::start();
    let queue = Mutex::new((0..FAMILIES.len()).collect::<VecDeque<_>>());
    let (wrong, counts) = (Mutex::new(Vec::new()), Mutex::new(BTreeMap::new()));
    // Tests wait more than they work.
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let Some(number) = queue.lock().unwrap().pop_front() else { return };
                    // On 512-byte blocks this test asks about one block and expects an answer about another
                    // (test_get_lba_status_unmap_single.c: asks for i + 1, expects i + 8). It is run below.
                    let may_fail: &[&str] =
                        if FAMILIES[number] == "GetLBAStatus" { &["UnmapSingle"] } else { &[] };
                    let (found, both) = complaints(number, may_fail, tgtd.as_ref());
                    wrong.lock().unwrap().extend(found);
                    counts.lock().unwrap().extend(both.map(|both| (number, both)));
                }
            });
        }
    });
    if tgtd.is_some() {
        print_table(&counts.into_inner().unwrap());
    }
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn libiscsi_finds_nothing_on_other_blocks() {
    if !installed("iscsi-test-cu", "libiscsi-bin") {
        return;
    }
    let families = [
        ("GetLBAStatus", 512, 512),
        ("ReadCapacity16", 4096, 4096),
        ("Read16", 4096, 4096),
        ("CompareAndWrite", 512, 512),
        ("iSCSIResiduals", 4096, 4096),
    ];
    for (family, logical_block, physical_block) in families {
        let geometry = Geometry { logical_block, physical_block, ..GEOMETRY };
        let server = Setup { geometry, ..Setup::default() }.start();
        let (verdicts, text) = run(family, &[server.url()]);
        assert!(!verdicts.is_empty(), "{text}");
        // What is about logical blocks in a physical one is skipped where both are the same.
        let failed: Vec<_> = verdicts.iter().filter(|(_, verdict)| *verdict == Verdict::Failed).collect();
        assert!(failed.is_empty(), "{family}: {failed:?}\n{text}");
    }
}

fn output(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn libiscsis_tools_see_the_disk() {
    if !installed("iscsi-ls", "libiscsi-bin") {
        return;
    }
    let server = Running::start();
    let list = output("iscsi-ls", &["-s", &format!("iscsi://{}", server.address)]);
    assert!(list.contains(&format!("Target:{} Portal:{},1", server.name, server.address)), "{list}");
    assert!(list.contains("Lun:1    Type:DIRECT_ACCESS (Size:63M)"), "{list}");
    let inquiry = output("iscsi-inq", &[&server.url()]);
    assert!(inquiry.contains("Vendor:LONGHORN") && inquiry.contains("Product:VIRTUAL-DISK"), "{inquiry}");
    let capacity = output("iscsi-readcapacity16", &[&server.url()]);
    assert!(capacity.contains("Total size:67108864") && capacity.contains("LBPME:1 LBPRZ:1"), "{capacity}");
}

#[test]
fn libiscsi_proves_itself() {
    if !installed("iscsi-inq", "libiscsi-bin") {
        return;
    }
    let mut setup = Setup::default();
    let initiator = Credentials { name: "alice".into(), secret: b"a-long-secret".to_vec() };
    let target = Some(Credentials { name: "demo".into(), secret: b"the-targets-own".to_vec() });
    setup.target.chap = Some(Chap { initiator, target });
    let server = setup.start();
    let url = |who: &str| server.url().replace("iscsi://", &format!("iscsi://{who}@"));
    let both = url("alice%a-long-secret") + "?target_user=demo&target_password=the-targets-own";
    for url in [url("alice%a-long-secret"), both] {
        assert!(output("iscsi-inq", &[&url]).contains("VIRTUAL-DISK"), "{url}");
    }
    for url in [server.url(), url("alice%a-wrong-secret"), url("bob%a-long-secret")] {
        let refused = Command::new("iscsi-inq").arg(&url).stdin(Stdio::null()).output().unwrap();
        assert!(!refused.status.success(), "{url}: {refused:?}");
    }
}

#[test]
fn qemu_reads_what_it_wrote() {
    let help = Command::new("qemu-img").arg("--help").output();
    let known = help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains(" iscsi "));
    // QEMU on Debian has it in a module of its own.
    let probe = Running::start();
    let works = known
        || Command::new("qemu-img")
            .args(["info", &probe.url()])
            .output()
            .is_ok_and(|out| out.status.success());
    if !works {
        println!(
            "SKIP qemu-img: not installed, or without iSCSI (Debian packages qemu-utils, qemu-block-extra)"
        );
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (from, back) = (dir.path().join("from.raw"), dir.path().join("back.raw"));
    let bytes: Vec<u8> = (0..64_u32 << 20)
        .map(|i| if i >> 20 & 1 == 0 { (i / 4096 + i).to_le_bytes()[0] } else { 0 })
        .collect();
    std::fs::write(&from, &bytes).unwrap();
    let (from, back) = (from.to_str().unwrap(), back.to_str().unwrap());
    let server = Running::start();
    output("qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", from, &server.url()]);
    output("qemu-img", &["convert", "-f", "raw", "-O", "raw", &server.url(), back]);
    assert!(std::fs::read(back).unwrap() == bytes);
    let map = output("qemu-img", &["map", "--output=json", "-f", "raw", &server.url()]);
    assert!(map.contains("\"zero\": true") && map.contains("\"data\": true"), "{map}");
}
