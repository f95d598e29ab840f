//! Making, checking, mounting and growing file systems, by the programs that come with them.

use std::fs;
use std::io::{self, Read as _};
use std::path::Path;
use std::process::{ExitStatus, Output, Stdio};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _};
use tokio::process::Command;

use super::mounts::block_numbers;
use crate::Refused;

/// How long a program may take. A check of a large file system after a power cut takes minutes.
const PATIENCE: Duration = Duration::from_secs(1800);

/// blkid(8): nothing was found on the device.
const BLKID_NOTHING: i32 = 2;

/// Bytes that a device has to give before it counts as empty; every volume has more.
const BEGINNING: usize = 1 << 20;

/// Bytes in which the file systems that are made here have their superblock: XFS the first ones, ext4 those from 1024 on. mkfs.ext4
/// clears them before anything else and writes them last, so that one that was killed leaves them empty, and may begin anew.
const SUPERBLOCKS: usize = 2048;

/// Bytes of a sector, in which the kernel tells sizes of devices whatever theirs are.
const SECTOR: u64 = 512;

/// How an XFS begins, where its superblock names the root directory, and where it says that something is at it
/// (`sb_rootino`, `sb_inprogress`; XFS Filesystem Structure).
const XFS_MAGIC: &[u8] = b"XFSB";
const XFS_ROOT: std::ops::Range<usize> = 56..64;
const XFS_IN_PROGRESS: usize = 126;
/// No inode (NULLFSINO).
const XFS_NO_INODE: &[u8] = &[0xff; 8];

/// What fsck.ext4 ends with, bit by bit: errors were corrected, of a file system that is in use; errors are left.
const FSCK_CORRECTED: i32 = 1 | 2;
const FSCK_LEFT: i32 = 4;

/// Bytes that are kept of what a program says on either stream. A check may have a line for each block of a damaged file system.
const KEPT: u64 = 64 << 10;

/// Runs a program. Its output is what it said, or the first [`KEPT`] bytes of it.
pub(super) async fn run(program: &str, args: &[&str]) -> Result<Output, Refused> {
    run_within(PATIENCE, program, args).await
}

async fn run_within(patience: Duration, program: &str, args: &[&str]) -> Result<Output, Refused> {
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).env("LC_ALL", "C");
    match tokio::time::timeout(patience, listened_to(command)).await {
        Ok(Ok(output)) => Ok(output),
        Ok(Err(e)) if e.kind() == io::ErrorKind::NotFound => Err(Refused::Failed(format!(
            "this node has no {program}: install it (longhornctl doctor says which package)"
        ))),
        Ok(Err(e)) => Err(Refused::Failed(format!("{program}: {e}"))),
        // It goes on, and may still do what it was begun for: nobody is to take that for undone.
        Err(_) => Err(Refused::NotYet(format!("{program} has not ended within {} s", patience.as_secs()))),
    }
}

/// Waits for a program, and reads what it says to the end.
async fn listened_to(mut command: Command) -> io::Result<Output> {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let (stdout, stderr) = (beginning_of(child.stdout.take()), beginning_of(child.stderr.take()));
    let (stdout, stderr, status) = tokio::try_join!(stdout, stderr, child.wait())?;
    Ok(Output { status, stdout, stderr })
}

/// The first bytes of a stream. The others are read, too: nobody waits for room to say them.
async fn beginning_of(stream: Option<impl AsyncRead + Unpin>) -> io::Result<Vec<u8>> {
    let mut kept = Vec::new();
    if let Some(mut stream) = stream {
        (&mut stream).take(KEPT).read_to_end(&mut kept).await?;
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await?;
    }
    Ok(kept)
}

/// What a program said, in one line.
pub(super) fn said(output: &Output) -> String {
    let text = [output.stderr.as_slice(), output.stdout.as_slice()].map(String::from_utf8_lossy).join(" ");
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    line.chars().take(500).collect()
}

/// Runs a program that has to succeed.
pub(super) async fn must(program: &str, args: &[&str]) -> Result<Output, Refused> {
    let output = run(program, args).await?;
    if output.status.success() {
        return Ok(output);
    }
    Err(Refused::Failed(format!("{program} {}: {}: {}", args.join(" "), output.status, said(&output))))
}

/// A path as an argument.
pub(super) fn text(path: &Path) -> Result<&str, Refused> {
    path.to_str().ok_or_else(|| Refused::Argument(format!("{} is not UTF-8", path.display())))
}

/// What is on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// Nothing that is known: it may be formatted.
    Nothing,
    /// A file system of this kind that was never finished: whoever made it was ended meanwhile. It never held anything.
    Begun(String),
    /// This file system.
    FileSystem(String),
    /// Something else, a partition table for instance.
    Other(String),
}

/// Looks at a device. Doubt is an error: what seems empty is formatted.
pub(super) async fn look(device: &Path) -> Result<Content, Refused> {
    let path = text(device)?;
    let output =
        run("blkid", &["-p", "-o", "export", "-s", "TYPE", "-s", "PTTYPE", "-s", "USAGE", path]).await?;
    match output.status.code() {
        Some(0) => match content(&String::from_utf8_lossy(&output.stdout)) {
            Content::FileSystem(kind) if kind == "xfs" && is_unfinished_xfs(device).await? => {
                Ok(Content::Begun(kind))
            }
            other => Ok(other),
        },
        // It says the same of a device that it cannot read, of a file system whose mark is damaged, and of what has none.
        Some(BLKID_NOTHING) => {
            let is_empty = beginning(device).await?.iter().take(SUPERBLOCKS).all(|byte| *byte == 0);
            Ok(if is_empty { Content::Nothing } else { unnamed() })
        }
        _ => Err(Refused::Failed(format!("blkid {path}: {}: {}", output.status, said(&output)))),
    }
}

/// True for an XFS whose mkfs was ended before it had a root directory: no file was ever in it. The mark alone does not say
/// that: copies of the superblock have it for ever, and xfs_copy and xfs_mdrestore set it, so a file system that somebody
/// restores has it, too.
async fn is_unfinished_xfs(device: &Path) -> Result<bool, Refused> {
    let beginning = beginning(device).await?;
    let is_marked = beginning.get(XFS_IN_PROGRESS) == Some(&1);
    Ok(beginning.starts_with(XFS_MAGIC) && is_marked && beginning.get(XFS_ROOT) == Some(XFS_NO_INODE))
}

/// The beginning of the device, where file systems have their marks. Fails unless all of it can be read.
async fn beginning(device: &Path) -> Result<Vec<u8>, Refused> {
    let path = device.to_owned();
    let read = move || -> io::Result<Vec<u8>> {
        let mut beginning = vec![0; BEGINNING];
        std::fs::File::open(path)?.read_exact(&mut beginning)?;
        Ok(beginning)
    };
    let done = tokio::task::spawn_blocking(read).await.map_err(|e| Refused::Failed(e.to_string()))?;
    done.map_err(|e| Refused::Failed(format!("{} cannot be read: {e}", device.display())))
}

/// Lines of NAME=VALUE.
fn content(told: &str) -> Content {
    let field = |name: &str| told.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
    match (field("USAGE"), field("TYPE"), field("PTTYPE")) {
        (Some("filesystem") | None, Some(kind), _) => Content::FileSystem(kind.to_owned()),
        (_, Some(kind), _) => Content::Other(kind.to_owned()),
        (_, None, Some(table)) => Content::Other(format!("a partition table ({table})")),
        (_, None, None) => unnamed(),
    }
}

fn unnamed() -> Content {
    Content::Other("something that blkid has no name for".to_owned())
}

/// Makes a file system. `options`: further arguments of mkfs; `over`: over one that is there.
pub(super) async fn make(device: &Path, kind: &str, options: &str, over: bool) -> Result<(), Refused> {
    let path = text(device)?;
    let mut args: Vec<&str> = options.split_whitespace().collect();
    if kind == "ext4" {
        // Reserved blocks are for a system's own disk.
        args.extend(["-m0"]);
    }
    if over {
        args.push(if kind == "ext4" { "-F" } else { "-f" });
    }
    args.push(path);
    tracing::info!(device = path, kind, "file system is made");
    must(&format!("mkfs.{kind}"), &args).await.map(drop)
}

/// Checks an ext4 file system before it is mounted, and repairs what can be repaired without a decision. XFS replays its
/// log when it is mounted.
pub(super) async fn check(device: &Path, kind: &str) -> Result<(), Refused> {
    if kind != "ext4" {
        return Ok(());
    }
    let path = text(device)?;
    let output = run("fsck.ext4", &["-p", path]).await?;
    checked(path, output.status, &said(&output))
}

/// What a check has found. One that was ended, or could not read the device, says nothing of the file system.
fn checked(path: &str, status: ExitStatus, said: &str) -> Result<(), Refused> {
    match status.code() {
        Some(code) if code & !FSCK_CORRECTED == 0 => Ok(()),
        Some(code) if code & FSCK_LEFT != 0 => Err(Refused::Failed(format!(
            "the file system on {path} needs a repair that asks questions: run fsck.ext4 on it. {said}"
        ))),
        _ => Err(Refused::Failed(format!("fsck.ext4 {path}: {status}: {said}"))),
    }
}

/// Mounts a file system.
pub(super) async fn mount(
    device: &Path,
    point: &Path,
    kind: &str,
    flags: &[String],
    read_only: bool,
) -> Result<(), Refused> {
    let mut options: Vec<String> = flags.to_vec();
    if read_only {
        options.push("ro".to_owned());
    }
    // A clone has its source's UUID, and XFS mounts only one of a UUID on a node without this.
    if kind == "xfs" && !options.iter().any(|o| o == "nouuid") {
        options.push("nouuid".to_owned());
    }
    let options = options.join(",");
    let mut args = vec!["-t", kind];
    if !options.is_empty() {
        args.extend(["-o", &options]);
    }
    args.extend([text(device)?, text(point)?]);
    must("mount", &args).await.map(drop)
}

/// What came of growing a mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Growth {
    /// It is as large as its device.
    Done,
    /// The kernel lets nobody without CAP_SYS_RESOURCE do that to a mounted ext4.
    NotMounted(Refused),
}

/// Grows a mounted file system to its device. One that is as large already stays as it is.
pub(super) async fn grow(device: &Path, point: &Path, kind: &str) -> Result<Growth, Refused> {
    match kind {
        "ext4" => {
            let output = run("resize2fs", &[text(device)?]).await?;
            if output.status.success() {
                return Ok(Growth::Done);
            }
            if said(&output).contains("Permission denied") {
                return Ok(Growth::NotMounted(Refused::Failed(format!(
                    "{} grows while it is mounted only with CAP_SYS_RESOURCE: give it to the driver, or mount the volume anew. {}",
                    device.display(),
                    said(&output)
                ))));
            }
            Err(Refused::Failed(format!("resize2fs: {}: {}", output.status, said(&output))))
        }
        "xfs" => must("xfs_growfs", &[text(point)?]).await.map(|_| Growth::Done),
        _ => Err(Refused::Precondition(format!("a file system {kind:?} is not grown by this driver"))),
    }
}

/// Grows an ext4 that is mounted nowhere to its device. resize2fs asks for a whole check before.
pub(super) async fn grow_unmounted(device: &Path) -> Result<(), Refused> {
    let path = text(device)?;
    let output = run("fsck.ext4", &["-f", "-p", path]).await?;
    checked(path, output.status, &said(&output))?;
    must("resize2fs", &[path]).await.map(drop)
}

/// True for a device that takes no writes. It is not opened.
pub(super) fn is_read_only(device: &Path) -> Result<bool, Refused> {
    Ok(told_by_kernel(device, "ro")?.trim() == "1")
}

/// Bytes of a device. It is not opened: where it is lost, whoever opens it may wait for ever, and the kubelet asks each minute.
pub(super) fn size(device: &Path) -> Result<u64, Refused> {
    let told = told_by_kernel(device, "size")?;
    let sectors: Option<u64> = told.trim().parse().ok();
    let bytes = sectors.and_then(|sectors| sectors.checked_mul(SECTOR));
    bytes.ok_or_else(|| Refused::Failed(format!("{} has {told:?} sectors", device.display())))
}

/// What the kernel says of a device in a file of its directory (sysfs).
fn told_by_kernel(device: &Path, file: &str) -> Result<String, Refused> {
    let failed = |why: &dyn std::fmt::Display| Refused::Failed(format!("{}: {why}", device.display()));
    let (major, minor) = block_numbers(device).ok_or_else(|| failed(&"this is no device"))?;
    fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/{file}")).map_err(|e| failed(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_blkid_tells_is_understood() {
        let cases = [
            ("DEVNAME=/dev/x\nTYPE=ext4\nUSAGE=filesystem\n", Content::FileSystem("ext4".into())),
            ("TYPE=crypto_LUKS\nUSAGE=crypto\n", Content::Other("crypto_LUKS".into())),
            ("PTTYPE=gpt\n", Content::Other("a partition table (gpt)".into())),
        ];
        for (told, expected) in cases {
            assert_eq!(content(told), expected);
        }
        assert!(matches!(content(""), Content::Other(_)), "success without a word is no empty device");
    }

    #[tokio::test]
    async fn what_a_program_says_is_heard_to_its_end_and_kept_in_part() {
        let script = "yes | head -c 10000000; yes | head -c 1000000 >&2; exit 3";
        let output = run("sh", &["-c", script]).await.unwrap();
        assert_eq!(output.status.code(), Some(3));
        assert_eq!((output.stdout.len() as u64, output.stderr.len() as u64), (KEPT, KEPT));
        let output = run("sh", &["-c", "echo one; echo two >&2"]).await.unwrap();
        assert_eq!((&*output.stdout, &*output.stderr), (&b"one\n"[..], &b"two\n"[..]));
    }

    /// The kubelet takes a failure for an end: what is mounted after that nobody would unmount.
    #[tokio::test]
    async fn a_program_that_goes_on_has_not_failed() {
        let refused = run_within(Duration::from_millis(10), "sleep", &["3"]).await.unwrap_err();
        assert!(matches!(refused, Refused::NotYet(_)), "{refused:?}");
    }

    #[test]
    fn what_is_no_device_is_neither_writable_nor_protected() {
        for path in ["/dev/null", "/nowhere"] {
            assert!(is_read_only(Path::new(path)).is_err() && size(Path::new(path)).is_err(), "{path}");
        }
    }

    #[test]
    fn only_errors_that_are_left_need_people() {
        use std::os::unix::process::ExitStatusExt;
        // As wait(2) gives them: an exit status is the second byte, a signal the first.
        for (raw, expected) in [
            (0, Ok(())),
            (1 << 8, Ok(())),
            (3 << 8, Ok(())),
            (4 << 8, Err(true)),
            (12 << 8, Err(true)),
            (8 << 8, Err(false)),
            (9, Err(false)),
        ] {
            let found = checked("/dev/x", ExitStatus::from_raw(raw), "why");
            assert_eq!(found.map_err(|e| e.to_string().contains("asks questions")), expected, "{raw}");
        }
    }

    #[tokio::test]
    async fn a_real_device_is_looked_at_made_and_looked_at_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk");
        for (kind, size) in [("ext4", 16 << 20), ("xfs", 300 << 20)] {
            fs::File::create(&file).unwrap().set_len(size).unwrap();
            assert_eq!(look(&file).await.unwrap(), Content::Nothing);
            make(&file, kind, "", false).await.unwrap();
            assert_eq!(look(&file).await.unwrap(), Content::FileSystem(kind.to_owned()));
            check(&file, kind).await.unwrap();
        }
        assert!(look(&dir.path().join("nowhere")).await.is_err(), "what cannot be read is not empty");
    }

    #[tokio::test]
    async fn what_has_anything_where_a_file_system_has_its_mark_is_not_empty() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let file = fs::OpenOptions::new().read(true).write(true).create_new(true).open(&image).unwrap();
        file.set_len(16 << 20).unwrap();
        make(&image, "ext4", "", false).await.unwrap();
        // Its superblock has another magic number (s_magic, at 56) than it had, and no checksum that is right.
        file.write_all_at(&[0, 0], 1024 + 56).unwrap();
        assert!(matches!(look(&image).await.unwrap(), Content::Other(_)), "fsck would get it back");
        // mkfs.ext4 clears the first 4 KiB, and writes them last: it may have been killed between.
        file.write_all_at(&[0; 4096], 0).unwrap();
        assert_eq!(look(&image).await.unwrap(), Content::Nothing);
        file.write_all_at(b"a row of a database", 0).unwrap();
        assert!(matches!(look(&image).await.unwrap(), Content::Other(_)));
    }

    #[tokio::test]
    async fn an_unmounted_ext4_grows_to_its_device() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("image");
        let file = fs::File::create(&image).unwrap();
        file.set_len(16 << 20).unwrap();
        make(&image, "ext4", "-b1024", false).await.unwrap();
        // Blocks of a file system, of 1 KiB (ext4's s_blocks_count_lo, 4 bytes into the second KiB).
        let blocks = || {
            let bytes = std::fs::read(&image).unwrap();
            u32::from_le_bytes(bytes[1028..1032].try_into().unwrap())
        };
        assert_eq!(blocks(), 16 << 10);
        file.set_len(32 << 20).unwrap();
        grow_unmounted(&image).await.unwrap();
        assert_eq!(blocks(), 32 << 10);
        file.set_len(1 << 20).unwrap();
        assert!(grow_unmounted(&image).await.is_err(), "half a file system is not grown");
    }
}
