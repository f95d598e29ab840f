//! A volume's life through a driver that runs: made, mounted, written, grown, snapshotted, cloned, read again, for both
//! file systems and for the device itself. Needs root and `CSI_ENDPOINT`, as `scripts/cluster env` prints it.

mod pod;

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use pod::Pod;
use tonic::transport::Channel;

/// True with the capability that the kernel asks for where ext4 grows (capability 24).
fn has_sys_resource() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> 24 & 1 == 1
}

/// Bytes that are nowhere by chance.
fn bytes(seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    };
    (0..1 << 20).map(|_| next()).collect()
}

/// Writes durably: to a file of the file system, or to the device.
fn write(at: &Path, bytes: &[u8]) {
    use std::io::Write;
    let path = if at.is_dir() { at.join("data") } else { at.to_owned() };
    let mut file =
        fs::OpenOptions::new().write(true).create(at.is_dir()).truncate(at.is_dir()).open(path).unwrap();
    file.write_all(bytes).unwrap();
    file.sync_all().unwrap();
}

fn read(at: &Path, length: usize) -> Vec<u8> {
    use std::io::Read;
    let path = if at.is_dir() { at.join("data") } else { at.to_owned() };
    let mut bytes = vec![0; length];
    fs::File::open(path).unwrap().read_exact(&mut bytes).unwrap();
    bytes
}

async fn live(channel: &Channel, kind: &str) {
    let place = tempfile::tempdir().unwrap();
    let mut pod = Pod::new(channel, place.path(), kind);
    let (old, new) = (bytes(1), bytes(2));
    let volume = pod.create(&format!("life-{kind}"), None).await;
    let at = pod.mount(&volume, false).await;
    assert_eq!(fs::metadata(&at).unwrap().file_type().is_block_device(), kind == "block");
    write(&at, &old);
    let snapshot = pod.snapshot(&volume, &format!("life-{kind}-s")).await;
    write(&at, &new);
    if kind == "ext4" && !has_sys_resource() {
        println!(
            "SKIP life: ext4 grows while mounted only with CAP_SYS_RESOURCE, which this machine does not give"
        );
    } else {
        let before = pod.total(&volume).await;
        pod.grow(&volume, 640).await;
        assert!(pod.total(&volume).await > before * 3 / 2, "{kind}: it did not grow");
    }
    pod.unmount(&volume).await;
    assert!(!at.exists());
    // Elsewhere in time: mounted anew, and for reading only.
    let at = pod.mount(&volume, true).await;
    assert!(read(&at, new.len()) == new, "{kind}: what was written is not there");
    let written = if at.is_dir() {
        fs::write(at.join("more"), "x").is_ok()
    } else {
        use std::io::Write;
        let opened = fs::OpenOptions::new().write(true).open(&at);
        opened.is_ok_and(|mut file| file.write_all(&old).is_ok() && file.sync_all().is_ok())
    };
    assert!(!written, "{kind}: written to though it is for reading only");
    // The clone is mounted beside its source, whose UUID it has.
    let clone = pod.create_sized(&format!("life-{kind}-clone"), Some(&snapshot), 640).await;
    let at = pod.mount(&clone, false).await;
    assert!(read(&at, old.len()) == old, "{kind}: a clone without its snapshot's bytes");
    let total = pod.total(&clone).await;
    assert!(total > 480 << 20, "{kind}: a clone that was asked for with 640 MiB has {total} bytes");
    write(&at, &new);
    assert!(read(&at, new.len()) == new);
    // What refused writes to a volume refuses none to the next one with its number.
    for volume in [&clone, &volume] {
        pod.unmount(volume).await;
    }
    let at = pod.mount(&volume, false).await;
    write(&at, &old);
    pod.unmount(&volume).await;
    pod.delete(&clone).await;
    pod.delete_snapshot(&snapshot).await;
    pod.delete(&volume).await;
}

#[tokio::test]
async fn what_a_pod_writes_is_there_again_and_in_a_clone() {
    let Some(channel) = pod::driver().await else {
        println!("elsewhere life: CSI_ENDPOINT does not name a driver; tests/cluster/sanity has one");
        return;
    };
    for kind in ["ext4", "xfs", "block"] {
        live(&channel, kind).await;
        println!("SHOWN {kind}: made, written, mounted for reading, snapshotted, cloned, deleted");
    }
}
