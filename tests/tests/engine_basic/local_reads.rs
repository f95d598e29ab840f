//! Reads that the engine does itself, in the files of replicas on its host.

use std::collections::BTreeMap;
use std::process::{Child, Stdio};

use tests::dice::Dice;

use super::*;

const BLOCK: usize = 4096;

/// The file systems that layers lie on: with O_DIRECT, and in memory.
fn places() -> Vec<tempfile::TempDir> {
    let mut places = vec![tempfile::tempdir().unwrap()];
    if Path::new("/dev/shm").is_dir() {
        places.push(tempfile::tempdir_in("/dev/shm").unwrap());
    }
    places
}

impl Replica {
    /// Reads that it has answered.
    fn reads(&self) -> u64 {
        self.status.snapshot().counters.reads
    }
}

impl Engine {
    /// Reads until that is done here.
    fn warm(&mut self, at: u64, asked: impl Fn() -> u64) {
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let before = asked();
            self.read(at, 4096);
            if asked() == before {
                return;
            }
            assert!(Instant::now() < until, "every read is sent");
            thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn the_replica_is_not_asked_for_what_its_files_hold() {
    for top in places() {
        let mut replica = Replica::start(top.path(), "v-r-1");
        let mut e = Engine::start(std::slice::from_ref(&replica), 1 << 32, &Remembered::default());
        e.write(0, 1, 1 << 20);
        e.warm(0, || replica.reads());
        let asked = replica.reads();
        assert_eq!(e.read(4096, 64 << 10), vec![1; 64 << 10]);
        assert_eq!(e.read(0, 1 << 20), vec![1; 1 << 20]);
        assert_eq!(e.read(512, 1024), vec![1; 1024]);
        // What is written again stays where it is; a part of a block is read first.
        e.write(8192, 2, 4096);
        e.write(8192 + 512, 3, 512);
        let mixed = e.read(8192, 4096);
        assert_eq!((mixed[0], mixed[512], mixed[1024]), (2, 3, 2));
        assert_eq!(replica.reads(), asked);
        // Zeroes, below the end of what was written.
        e.warm(40 << 20, || replica.reads());
        let asked = replica.reads();
        assert_eq!(e.read(40 << 20, 1 << 20), vec![0; 1 << 20]);
        assert_eq!(replica.reads(), asked);
        // What changes is seen at once, and read here again soon.
        e.io(Op::Unmap, Extent::new(0, 4096), None);
        assert_eq!(e.read(0, 4096), vec![0; 4096]);
        e.write(40 << 20, 4, 4096);
        assert_eq!(e.read(40 << 20, 8192), [vec![4; 4096], vec![0; 4096]].concat());
        e.command(snapshot("one"));
        e.write(4096, 5, 4096);
        for _ in 0..2 {
            assert_eq!(e.read(4096, 8192)[..4097], [&[5; 4096][..], &[2]].concat());
            e.warm(4096, || replica.reads());
        }
        e.shut_down();
        replica.stop();
    }
}

/// Everything at once that moves blocks, beside reads of what does not change meanwhile.
#[test]
fn whatever_moves_beside_them_reads_give_what_was_written() {
    for (n, top) in (0..).zip(places()) {
        let mut replica = Replica::start(top.path(), "v-r-1");
        let mut e = Engine::start(std::slice::from_ref(&replica), 1 << 32, &Remembered::default());
        let mut mover =
            Mover { dice: Dice::new(7 + n), model: vec![0; 3 << 10], kept: BTreeMap::new(), made: 0 };
        let until = Instant::now() + Duration::from_secs(6);
        while Instant::now() < until {
            mover.round(&mut e);
        }
        let sent = replica.reads();
        let stats = e.handle.stats()[0].reads.count.load(std::sync::atomic::Ordering::Relaxed);
        assert!(sent < stats, "of {stats} reads {sent} were sent");
        println!("{stats} reads, {sent} of them sent, {} snapshots", mover.made);
        e.shut_down();
        replica.stop();
    }
}

struct Mover {
    dice: Dice,
    /// The byte of each block.
    model: Vec<u8>,
    /// What snapshots hold.
    kept: BTreeMap<String, Vec<u8>>,
    made: u32,
}

impl Mover {
    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.dice.below(n as u64)).unwrap()
    }

    fn range(&mut self) -> (usize, usize) {
        let len = if self.dice.chance(800) { 1 } else { 1 + self.below(64) };
        (self.below(self.model.len() - len), len)
    }

    /// A few requests at one time, none of which touches another's blocks, and perhaps something that moves blocks.
    fn round(&mut self, e: &mut Engine) {
        let moving = self.move_blocks(e);
        let mut taken: Vec<(usize, usize)> = Vec::new();
        let mut wanted = BTreeMap::new();
        for _ in 0..24 {
            let (first, len) = self.range();
            if taken.iter().any(|(f, l)| first < f + l && *f < first + len) {
                continue;
            }
            taken.push((first, len));
            let range = Extent::new((first * BLOCK) as u64, (len * BLOCK) as u64);
            let blocks = first..first + len;
            let tag = match self.dice.below(10) {
                0..7 => {
                    let held = self.model[blocks].iter().flat_map(|byte| [*byte; BLOCK]).collect::<Vec<_>>();
                    let tag = e.submit(Op::Read, range, None);
                    wanted.insert(tag, Some((first, held)));
                    continue;
                }
                7 | 8 => {
                    let byte = 1 + u8::try_from(self.dice.below(250)).unwrap();
                    self.model[blocks].fill(byte);
                    e.submit(Op::Write { fua: false }, range, Some(vec![byte; len * BLOCK]))
                }
                _ => {
                    self.model[blocks].fill(0);
                    e.submit(Op::Unmap, range, None)
                }
            };
            wanted.insert(tag, None);
        }
        while !wanted.is_empty() {
            let (tag, result, bytes) = e.answers.recv_timeout(Duration::from_secs(30)).expect("an answer");
            assert_eq!(result, Ok(()));
            if let Some((first, held)) = wanted.remove(&tag).expect("asked once") {
                assert!(bytes == held, "block {first} and behind: {} for {}", bytes[0], held[0]);
            }
        }
        if let Some(moving) = moving {
            moving.recv_timeout(Duration::from_secs(60)).expect("an end").expect("done");
        }
    }

    fn move_blocks(
        &mut self,
        e: &Engine,
    ) -> Option<crossbeam_channel::Receiver<Result<(), datapath::conductor::CommandError>>> {
        let name = self.dice.pick(&self.kept.keys().collect::<Vec<_>>()).cloned();
        match (self.dice.below(60), name) {
            (0 | 1, _) if self.kept.len() < 6 => {
                let name = format!("s{}", self.made);
                self.made += 1;
                if self.dice.chance(500) {
                    // Nothing is under way: this is what it holds.
                    e.command(snapshot(&name));
                    self.kept.insert(name, self.model.clone());
                    return None;
                }
                let moving = e.handle.command(snapshot(&name));
                self.kept.insert(name, Vec::new());
                Some(moving)
            }
            (2 | 3, Some(name)) => {
                e.command(Command::RemoveSnapshot { name: name.clone() });
                self.kept.remove(&name);
                None
            }
            (4..8, _) => {
                // Refused while another fold runs, or with nothing to fold.
                let _ = e.handle.command(Command::Purge).recv_timeout(Duration::from_secs(60));
                None
            }
            (8, Some(name)) if !self.kept[&name].is_empty() => {
                let created = "2026-01-01T00:00:00Z".into();
                e.command(Command::Revert { name: name.clone(), created });
                self.model = self.kept[&name].clone();
                None
            }
            _ => None,
        }
    }
}

/// The queue's thread stands still between a read's beginning and its end; meanwhile another engine is let in, takes a snapshot and
/// writes. What the first one reads then in the files is what was there before.
#[test]
fn an_engine_that_was_replaced_answers_nothing_of_what_it_reads() {
    for top in places() {
        let mut replica = Replica::start(top.path(), "v-r-1");
        let authority = Remembered::default();
        let mut old = Engine::start(std::slice::from_ref(&replica), 1 << 32, &authority);
        old.write(0, 1, 64 << 10);
        old.warm(0, || replica.reads());
        let asked = replica.reads();
        assert_eq!(old.read(0, 64 << 10)[0], 1);
        assert_eq!(replica.reads(), asked);
        let (held, wait) = mpsc::channel::<()>();
        let (begun, has_begun) = mpsc::channel();
        old.work
            .send(Box::new(move |engine| {
                begun.send(()).unwrap();
                let _ = wait.recv();
                // On a disk the ring has it yet to begin; in memory it is looked up only now.
                let range = Extent::new(0, 4096);
                engine.submit(Request::<Payload> { tag: 1000, op: Op::Read, range, data: None });
            }))
            .unwrap();
        old.handle.wake_queues();
        has_begun.recv().unwrap();
        let mut new = Engine::start(std::slice::from_ref(&replica), 2 << 32, &authority);
        new.command(snapshot("one"));
        new.write(0, 2, 64 << 10);
        held.send(()).unwrap();
        let answered = old.answers.recv_timeout(Duration::from_secs(2));
        assert!(!matches!(answered, Ok((_, Ok(()), _))), "it was answered");
        assert_eq!(new.read(0, 4096), vec![2; 4096]);
        old.handle.end_queues();
        drop(old);
        new.shut_down();
        replica.stop();
    }
}

/// Files of layers that are gone and still open in this process.
fn lingering(top: &Path) -> Vec<PathBuf> {
    use std::os::unix::fs::MetadataExt;
    let open = std::fs::read_dir("/proc/self/fd").unwrap();
    let gone = open.filter_map(|fd| {
        let fd = fd.ok()?.path();
        // A file may have another name than that which it was opened by.
        let is_gone = std::fs::metadata(&fd).ok()?.nlink() == 0;
        std::fs::read_link(fd).ok().filter(|name| is_gone && name.starts_with(top))
    });
    gone.filter(|name| name.to_string_lossy().contains("/volume-")).collect()
}

/// Also by an engine that has nothing to do.
#[test]
fn the_space_of_what_was_folded_comes_back() {
    let top = tempfile::tempdir().unwrap();
    let mut replica = Replica::start(top.path(), "v-r-1");
    let mut e = Engine::start(std::slice::from_ref(&replica), 1 << 32, &Remembered::default());
    e.write(0, 1, 1 << 20);
    e.command(snapshot("one"));
    e.write(0, 2, 4096);
    e.warm(4096, || replica.reads());
    e.command(Command::RemoveSnapshot { name: "one".into() });
    e.command(Command::Purge);
    let gone = top.path().join("v-r-1/volume-snap-one.img");
    let until = Instant::now() + Duration::from_secs(20);
    while gone.exists() || !lingering(top.path()).is_empty() {
        assert!(Instant::now() < until, "{:?} are held", lingering(top.path()));
        thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(e.read(0, 8192), [vec![2; 4096], vec![1; 4096]].concat());
    e.warm(4096, || replica.reads());
    e.shut_down();
    replica.stop();
}

const CHILD: &str = "ENGINE_TEST_REPLICA";

/// A replica's process; killed when dropped.
struct Killable(Child);

impl Drop for Killable {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// Not a test by itself: a replica that can be killed.
#[test]
fn child() {
    if let Some(top) = std::env::var_os(CHILD) {
        serve::run(of_child(Path::new(&top))).unwrap();
    }
}

fn of_child(top: &Path) -> serve::Options {
    serve::Options {
        directory: top.join("v-r-1"),
        size: Some(SIZE),
        lock_wait: Duration::from_secs(10),
        volume: "v".into(),
        replica: "v-r-1".into(),
        key: [7; 32],
        map_key: [0; 32],
        listen: serve::Address::Unix(top.join("v-r-1.sock")),
        status: serve::Status::default(),
    }
}

fn start_child(top: &Path) -> Killable {
    let _ = std::fs::remove_file(top.join("v-r-1.sock"));
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "local_reads::child", "--nocapture"])
        .env(CHILD, top)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let child = Killable(child);
    let until = Instant::now() + Duration::from_secs(20);
    while std::os::unix::net::UnixStream::connect(top.join("v-r-1.sock")).is_err() {
        assert!(Instant::now() < until, "it does not listen");
        thread::sleep(Duration::from_millis(5));
    }
    child
}

/// The engine's copies of its descriptors keep a dead replica's locks: the next process comes in only when it has let go of them.
#[test]
fn a_replica_that_was_killed_comes_back_soon() {
    let top = tempfile::tempdir().unwrap();
    let mut child = start_child(top.path());
    let (name, directory, socket) =
        ("v-r-1".to_owned(), top.path().join("v-r-1"), top.path().join("v-r-1.sock"));
    let replica = Replica { name, directory, socket, status: serve::Status::default(), thread: None };
    let mut e = Engine::start(std::slice::from_ref(&replica), 1 << 32, &Remembered::default());
    for round in 1..5_u8 {
        e.write(0, round, 1 << 20);
        for _ in 0..300 {
            assert_eq!(e.read(8192, 4096), vec![round; 4096]);
        }
        // Some are under way.
        for n in 0..32 {
            e.submit(Op::Read, Extent::new(n * 4096, 4096), None);
        }
        drop(child);
        let began = Instant::now();
        child = start_child(top.path());
        let took = began.elapsed();
        assert!(took < Duration::from_secs(5), "it took {took:?} until it was there again");
        for _ in 0..32 {
            let (_, result, bytes) = e.answers.recv_timeout(Duration::from_secs(30)).expect("an answer");
            assert_eq!((result, bytes), (Ok(()), vec![round; 4096]));
        }
    }
    // Reads may all have been answered before it died; a write waits for the process that came after.
    e.write(0, 5, 1 << 20);
    e.healthy(1);
    e.shut_down();
    drop(child);
}
