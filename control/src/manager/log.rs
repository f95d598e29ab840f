//! Logs of processes, bounded in size.
//!
//! A process writes to its log itself, so that the manager's death does not touch it. The manager bounds the file: what
//! is there is copied to `NAME.log.1`, and the file cut to nothing. All writers append, so the next line lands at its
//! beginning. A line written between the last copied byte and the cut is lost; everything older than the copy, too.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// A log beyond this size is rotated: at 200 bytes a line, half a day of a line per second.
pub(super) const LOG_MAX: u64 = 10 << 20;

/// Bytes on the disk that the logs of processes which are no more may take together: each volume and each replica has names of its
/// own, and what they have left would fill the disk in time.
pub(super) const LEFT_MAX: u64 = 100 << 20;

/// Longest line that is told; the rest of a longer one is left out.
const LINE_MAX: u64 = 64 << 10;

/// Bytes of lines that are read at once, or a line more.
const PORTION: usize = 64 << 10;

/// Bytes at the end of a log in which the last line is looked for.
const TAIL: u64 = 4 << 10;

/// How the manager's own lines in a process's log begin.
const OWN: &str = "instance-manager: ";

/// Stands in the line about the end of a process, between its name and why.
pub(super) const ENDED: &str = " ended: ";

/// Opens a log for a process that is about to start.
pub(super) fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Adds a line of the manager's own.
pub(super) fn note(path: &Path, text: &str) {
    if let Err(e) = open(path).and_then(|mut log| writeln!(log, "{OWN}{text}")) {
        tracing::warn!(path = %path.display(), error = %e, "log cannot be written");
    }
}

/// Moves a log larger than `max` aside.
pub(super) fn rotate(path: &Path, max: u64) -> io::Result<()> {
    let mut log = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(log) => log,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
    };
    if log.metadata()?.len() <= max {
        return Ok(());
    }
    let older = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(older(path));
    // Reads until the writers are caught up with: hardly anything is left between the last read and the cut.
    io::copy(&mut log, &mut older?)?;
    log.set_len(0)
}

/// Removes the oldest logs in a directory that are of none of these processes, until the others of those take `max` bytes at most.
pub(super) fn sweep(directory: &Path, live: &[String], max: u64) -> io::Result<()> {
    let mut left = Vec::new();
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let (path, file) = (entry.path(), entry.file_name());
        let name =
            file.to_str().and_then(|file| file.strip_suffix(".1").unwrap_or(file).strip_suffix(".log"));
        if name.is_none_or(|name| live.iter().any(|live| live == name)) {
            continue;
        }
        match entry.metadata() {
            Ok(meta) if meta.is_file() => left.push((meta.mtime(), meta.blocks() * 512, path)),
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            Ok(_) | Err(_) => {}
        }
    }
    left.sort_unstable_by(|a, b| b.cmp(a));
    let mut sum = 0_u64;
    for (_, size, path) in left {
        sum = sum.saturating_add(size);
        if sum > max {
            std::fs::remove_file(path)?;
        }
    }
    Ok(())
}

/// The last line that a process itself wrote.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LastWords {
    /// It said why it ends: the line began with `error:`.
    Reason(String),
    /// Something else.
    Line(String),
}

/// Stands in the lines about the end of a process that was wanted.
pub(super) const WAS_ENDED: &str = " was ended";

/// Of a process that has nothing to say but how it is used.
const HELP_SHOWN: &str = "it was started without a command or arguments, and showed its help";

/// The last line that the last process in the log wrote itself; `None` if it wrote none. `of_usage`: the process did not understand
/// its command line or environment; what tells it then has lines about the usage behind it.
pub(super) fn last_words(path: &Path, of_usage: bool) -> Option<LastWords> {
    let mut log = File::open(path).ok()?;
    let len = log.metadata().ok()?.len();
    log.seek(SeekFrom::Start(len.saturating_sub(TAIL))).ok()?;
    let mut tail = Vec::new();
    log.take(TAIL).read_to_end(&mut tail).ok()?;
    let tail = String::from_utf8_lossy(&tail);
    let lines: Vec<&str> = tail.lines().map(str::trim).collect();
    // What the process before wrote says nothing of this one. The start of a process may be noted between its own lines, its end is
    // not.
    let is_end =
        |line: &&str| line.starts_with(OWN) && [ENDED, WAS_ENDED].iter().any(|end| line.contains(end));
    let lines = &lines[lines.iter().rposition(is_end).map_or(0, |end| end + 1)..];
    let is_said = |line: &&str| !line.is_empty() && !line.starts_with(OWN);
    let last = lines.iter().rposition(is_said)?;
    if of_usage && let Some(reason) = reason_above(&lines[..=last]) {
        return Some(LastWords::Reason(reason));
    }
    if of_usage && lines[..=last].iter().any(|line| line.starts_with("Usage: ")) {
        return Some(LastWords::Reason(HELP_SHOWN.to_owned()));
    }
    let last = lines[last];
    Some(match last.strip_prefix("error: ") {
        Some(reason) => LastWords::Reason(reason.to_owned()),
        None => LastWords::Line(last.to_owned()),
    })
}

/// What a process said of its command line: from `error:` to the next empty line.
fn reason_above(lines: &[&str]) -> Option<String> {
    let said: Vec<&str> = lines.iter().copied().filter(|line| !line.starts_with(OWN)).collect();
    let begin = said.iter().rposition(|line| line.starts_with("error: "))?;
    let said: Vec<&str> = said[begin..].iter().copied().take_while(|line| !line.is_empty()).collect();
    Some(said.join(" ").trim_start_matches("error: ").to_owned())
}

/// The lines of a log, the older part first. They are read portion by portion, so that between two of them no thread waits for whoever
/// takes them.
#[derive(Debug)]
pub(super) struct Lines {
    /// Those that have not been opened.
    parts: VecDeque<PathBuf>,
    open: Option<BufReader<File>>,
}

impl Lines {
    pub(super) fn of(path: &Path) -> Self {
        Self { parts: [older(path), path.to_owned()].into(), open: None }
    }

    /// The next portion; none: that was all.
    pub(super) fn portion(&mut self) -> io::Result<Vec<String>> {
        let (mut lines, mut bytes) = (Vec::new(), 0);
        while bytes < PORTION
            && let Some(line) = self.line()?
        {
            bytes += size_of::<String>() + line.len();
            lines.push(line);
        }
        Ok(lines)
    }

    fn line(&mut self) -> io::Result<Option<String>> {
        loop {
            let Some(log) = &mut self.open else {
                let Some(part) = self.parts.pop_front() else { return Ok(None) };
                self.open = match File::open(part) {
                    Ok(log) => Some(BufReader::new(log)),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => None,
                    Err(e) => return Err(e),
                };
                continue;
            };
            let mut bytes = Vec::new();
            if log.by_ref().take(LINE_MAX).read_until(b'\n', &mut bytes)? == 0 {
                self.open = None;
                continue;
            }
            if bytes.last() == Some(&b'\n') {
                bytes.pop();
            } else {
                log.skip_until(b'\n')?;
            }
            return Ok(Some(String::from_utf8_lossy(&bytes).into_owned()));
        }
    }
}

fn older(path: &Path) -> PathBuf {
    let mut older = path.as_os_str().to_owned();
    older.push(".1");
    older.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all_lines(path: &Path) -> Vec<String> {
        let (mut log, mut all) = (Lines::of(path), Vec::new());
        loop {
            match log.portion().unwrap() {
                portion if portion.is_empty() => return all,
                portion => all.extend(portion),
            }
        }
    }

    #[test]
    fn rotation_bounds_the_log_and_keeps_the_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.log");
        rotate(&path, 100).unwrap();
        let mut writer = open(&path).unwrap();
        for n in 0..200 {
            writeln!(writer, "line {n}").unwrap();
            rotate(&path, 100).unwrap();
            assert!(std::fs::metadata(&path).unwrap().len() <= 110);
        }
        assert!(std::fs::metadata(older(&path)).unwrap().len() <= 120);
        let lines = all_lines(&path);
        assert!(lines.len() > 10);
        let expected: Vec<String> = (200 - lines.len()..200).map(|n| format!("line {n}")).collect();
        assert_eq!(lines, expected);
    }

    #[test]
    fn of_processes_that_are_no_more_the_newest_logs_stay() {
        let dir = tempfile::tempdir().unwrap();
        let now = std::time::SystemTime::now();
        let write = |file: &str, age: u64| {
            std::fs::write(dir.path().join(file), [b'x'; 8000]).unwrap();
            let log = File::options().write(true).open(dir.path().join(file)).unwrap();
            log.set_modified(now - std::time::Duration::from_secs(age)).unwrap();
        };
        for (file, age) in [("v-r-1.log", 9), ("v-r-1.log.1", 99), ("v-r-2.log", 5), ("v-r-3.log", 7)] {
            write(file, age);
        }
        for (file, age) in [("v-e-0.log", 1000), ("v-e-0.log.1", 1001), ("notes.txt", 1002), ("v-r-4", 1003)]
        {
            write(file, age);
        }
        std::fs::create_dir(dir.path().join("d.log")).unwrap();
        let files = || {
            let mut files: Vec<String> = std::fs::read_dir(dir.path())
                .unwrap()
                .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                .collect();
            files.sort();
            files
        };
        let live = ["v-e-0".to_owned()];
        sweep(dir.path(), &live, 4 * 8192).unwrap();
        assert_eq!(files().len(), 9);
        sweep(dir.path(), &live, 2 * 8192).unwrap();
        let kept = ["d.log", "notes.txt", "v-e-0.log", "v-e-0.log.1", "v-r-2.log", "v-r-3.log", "v-r-4"];
        assert_eq!(files(), kept);
    }

    #[test]
    fn the_last_words_are_the_processs_own() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.log");
        assert_eq!(last_words(&path, false), None);
        let mut log = open(&path).unwrap();
        writeln!(log, "{}\nerror: the directory is damaged", "x".repeat(10_000)).unwrap();
        note(&path, "p is slow");
        assert_eq!(last_words(&path, false), Some(LastWords::Reason("the directory is damaged".into())));
        writeln!(log, "thread main panicked").unwrap();
        assert_eq!(last_words(&path, false), Some(LastWords::Line("thread main panicked".into())));
        // The one after it says nothing.
        for end in
            [format!("p{ENDED}killed by SIGSEGV"), format!("p{WAS_ENDED} for another program: exit status 0")]
        {
            writeln!(log, "the volume is open").unwrap();
            note(&path, &end);
            note(&path, "p starts as process 7, restart 0");
            assert_eq!((last_words(&path, false), last_words(&path, true)), (None, None), "{end}");
        }
    }

    #[test]
    fn of_a_command_line_that_is_not_understood_the_reason_is_told_and_not_where_help_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.log");
        let mut log = open(&path).unwrap();
        writeln!(log, "error: of another start").unwrap();
        note(&path, "p ended: of another start");
        let reason = |text: &str| Some(LastWords::Reason(text.to_owned()));
        let end = "\n\nUsage: longhorn [OPTIONS]\n\nFor more information, try '--help'.";
        writeln!(log, "error: invalid value 'abc' for '--queues <N>': invalid digit{end}").unwrap();
        assert_eq!(last_words(&path, true), reason("invalid value 'abc' for '--queues <N>': invalid digit"));
        note(&path, "p ended: as it says");
        assert_eq!(last_words(&path, true), None);
        writeln!(log, "error: arguments are missing:\n  --listen <ADDRESS>").unwrap();
        note(&path, "p starts as process 1");
        writeln!(log, "  <VOLUME>{end}").unwrap();
        assert_eq!(last_words(&path, true), reason("arguments are missing: --listen <ADDRESS> <VOLUME>"));
        note(&path, "p ended: as it says");
        // The help itself ends with whatever option comes last.
        writeln!(log, "Runs a volume{end}\n  --debug  Log more. Without it the level counts.").unwrap();
        assert_eq!(last_words(&path, true), reason(HELP_SHOWN));
        note(&path, "p ended: as it says");
        // Another program may end so without a word of ours.
        writeln!(log, "usage: other").unwrap();
        assert_eq!(last_words(&path, true), Some(LastWords::Line("usage: other".into())));
    }

    #[test]
    fn endless_lines_are_cut() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.log");
        std::fs::write(&path, format!("{}\nshort", "x".repeat(200_000))).unwrap();
        let lengths: Vec<u64> = all_lines(&path).iter().map(|line| line.len() as u64).collect();
        assert_eq!(lengths, [LINE_MAX, 5]);
    }

    #[test]
    fn a_portion_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.log");
        std::fs::write(&path, format!("{}\n", "x".repeat(50_000)).repeat(5)).unwrap();
        let mut log = Lines::of(&path);
        let portions: Vec<usize> = (0..4).map(|_| log.portion().unwrap().len()).collect();
        assert_eq!(portions, [2, 2, 1, 0]);
        std::fs::write(&path, "\n".repeat(PORTION)).unwrap();
        assert!(Lines::of(&path).portion().unwrap().len() < PORTION);
    }
}
