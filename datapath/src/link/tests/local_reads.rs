//! Reads in files that a replica has granted: what is read here, what is sent after all, and when files are let go of.

use std::convert::Infallible;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::time::Instant;

use crossbeam_channel::TryRecvError;
use lh_block::{BLOCK, IoError};
use lh_ring::{Changes, Watched};
use lh_wire::{COUNTERS, HEADER_LEN, Place, Places, flags};

use super::*;
use crate::message::{Switch, SwitchId};

/// A queue with one member that has granted a file: block `n` holds bytes `n`.
struct Bench {
    queue: EngineQueue,
    _news: Receiver<News>,
    far: UnixStream,
    /// What has come there and was not looked at.
    heard: Vec<OpCode>,
    ring: Ring,
    changes: Changes,
    session: Arc<()>,
    returned: Receiver<Infallible>,
    place: tempfile::TempDir,
    tag: u64,
}

fn blocks(first: u64, count: u64) -> Extent {
    Extent::new(first * BLOCK, count * BLOCK)
}

/// A grant, and what tells that nobody has it any more.
fn granted(
    number: u32,
    told_as: u32,
    changes: &Changes,
    files: Vec<File>,
    session: &Arc<()>,
) -> (Granted, Receiver<Infallible>) {
    let watched = Arc::new(Watched::open(changes.lend().unwrap(), COUNTERS).unwrap());
    let session = Arc::downgrade(session);
    let (sender, returned) = crossbeam_channel::unbounded();
    (Granted { number, told_as, watched, files, in_memory: false, session, returned: sender }, returned)
}

impl Bench {
    fn new(in_memory: bool) -> Self {
        let (mut queue, news) = queue();
        let (near, far) = UnixStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        queue.take(Mail::Link {
            member: A,
            socket: near.into(),
            checksums: false,
            lends: false,
            tells: false,
        });
        for (n, switch) in
            (1..).zip([Switch::Attach { member: A }, Switch::Promote { member: A }, Switch::Resume])
        {
            queue.take(Mail::Message(ToQueue::Switch(SwitchId(n), switch)));
        }
        let place = tempfile::tempdir().unwrap();
        let file =
            File::options().create_new(true).read(true).write(true).open(place.path().join("f")).unwrap();
        (0..16_u8).for_each(|n| file.write_all_at(&[n; 4096], u64::from(n) * BLOCK).unwrap());
        let changes = Changes::new(COUNTERS).unwrap();
        let session = Arc::new(());
        let (granted, returned) = granted(1, 7, &changes, vec![file], &session);
        queue.take(Mail::Places(A, Box::new(Granted { in_memory, ..granted })));
        let ring = Ring::new(16).unwrap();
        Self { queue, _news: news, far, heard: Vec::new(), ring, changes, session, returned, place, tag: 0 }
    }

    /// Submits a read, and lets everything go on that can.
    fn read(&mut self, range: Extent) -> Option<Result<Vec<u8>, IoError>> {
        self.tag += 1;
        self.queue.submit(Request { tag: self.tag, op: lh_block::Op::Read, range, data: None });
        self.queue.end_turn(&mut self.ring);
        self.turn()
    }

    /// Until it has an answer or was sent, which of the two it is to be; and for a while longer, for what comes with that.
    fn turn(&mut self) -> Option<Result<Vec<u8>, IoError>> {
        let deadline = Instant::now() + Duration::from_secs(60);
        let before = self.heard.len();
        let (mut done, mut rest) = (None, 3);
        while rest > 0 {
            assert!(Instant::now() < deadline, "it is neither answered nor sent");
            self.ring.turn(Some(Duration::from_millis(30))).unwrap();
            while let Some(completion) = self.ring.next() {
                self.queue.completion(completion);
            }
            self.queue.begin_turn();
            self.queue.end_turn(&mut self.ring);
            done = done.or_else(|| self.queue.poll_done());
            self.hear();
            rest -= u32::from(done.is_some() || self.heard[before..].contains(&OpCode::Read));
        }
        let done = done?;
        assert_eq!(done.tag, self.tag);
        Some(done.result.map(|()| done.data.unwrap().to_vec()))
    }

    /// What has been sent to the replica since the last look, apart from pings: it never answers.
    fn sent(&mut self) -> Vec<OpCode> {
        self.hear();
        std::mem::take(&mut self.heard)
    }

    fn hear(&mut self) {
        let mut bytes = Vec::new();
        let _ = self.far.read_to_end(&mut bytes);
        let headers = bytes.chunks(HEADER_LEN).map(|h| Header::decode(h.try_into().unwrap()).unwrap());
        self.heard.extend(headers.map(|h| h.op).filter(|op| *op != OpCode::Ping));
    }

    /// The replica says where the blocks of the first piece are.
    fn tell(&mut self, grant: u32, parts: &[(usize, Place)]) {
        let mut places = Places::new(self.changes.count(0));
        parts.iter().for_each(|(count, place)| places.push(*count, *place));
        let (bytes, len) = places.encode();
        let mut header =
            Header::request(OpCode::Places, PLACES, 0, 1 << 20, self.queue.generation).response(Status::Ok);
        (header.aux, header.payload) = (grant, u32::try_from(len).unwrap());
        assert!(header.has(flags::RESPONSE));
        let mut payload = self.queue.pool.alloc(header.payload, 1).unwrap();
        payload.write_at(0, &bytes[..len]);
        self.queue.told(A, &header, payload);
    }

    fn known(in_memory: bool) -> Self {
        let mut b = Self::new(in_memory);
        assert_eq!(b.read(blocks(0, 1)), None);
        assert_eq!(b.sent(), [OpCode::Read, OpCode::Places]);
        b.tell(7, &[(16, Place::File(0)), (40, Place::Zero), (200, Place::Asked)]);
        b
    }

    /// A file of another replica.
    fn strangers_file(&self) -> File {
        let path = self.place.path().join("g");
        std::fs::write(&path, [0xff; 16 * 4096]).unwrap();
        File::open(path).unwrap()
    }

    fn is_linked(&self) -> bool {
        self.queue.links[0].is_some()
    }

    fn is_returned(&self) -> bool {
        self.returned.try_recv() == Err(TryRecvError::Disconnected)
    }
}

#[test]
fn what_lies_in_one_place_is_read_here() {
    for in_memory in [true, false] {
        let mut b = Bench::known(in_memory);
        assert_eq!(b.read(blocks(3, 1)), Some(Ok(vec![3; 4096])));
        assert_eq!(b.read(blocks(4, 2)), Some(Ok([[4; 4096], [5; 4096]].concat())));
        assert_eq!(b.read(Extent::new(5 * BLOCK + 512, 1024)), Some(Ok(vec![5; 1024])));
        assert_eq!(b.read(blocks(16, 40)), Some(Ok(vec![0; 40 * 4096])));
        assert!(b.sent().is_empty());
        // In two places, and where nobody but the replica reads.
        for range in [blocks(15, 2), blocks(55, 2), blocks(100, 1)] {
            assert_eq!(b.read(range), None);
            assert_eq!(b.sent(), [OpCode::Read], "{range}");
        }
    }
}

/// Each of these is a read that would give what is no longer so.
#[test]
fn what_does_not_hold_any_more_is_sent() {
    for in_memory in [true, false] {
        let mut b = Bench::known(in_memory);
        b.changes.raise(0);
        assert_eq!(b.read(blocks(3, 1)), None);
        assert_eq!(b.sent(), [OpCode::Read]);
        assert_eq!(b.read(blocks(3, 1)), None);
        assert_eq!(b.sent(), [OpCode::Read, OpCode::Places]);
        let mut b = Bench::known(in_memory);
        b.changes = Changes::new(1).unwrap();
        assert_eq!(b.read(blocks(3, 1)), None);
        assert_eq!(b.sent(), [OpCode::Read]);
        assert!(b.is_returned(), "what is over is let go of");
    }
}

/// The change comes while the disk is at it.
#[test]
fn what_does_not_hold_any_more_when_it_was_read_is_sent() {
    type Change = fn(&mut Bench);
    let changes: [Change; 2] = [|b| b.changes.raise(0), |b| b.changes = Changes::new(1).unwrap()];
    for change in changes {
        let mut b = Bench::known(false);
        b.tag += 1;
        b.queue.submit(Request { tag: b.tag, op: lh_block::Op::Read, range: blocks(3, 1), data: None });
        b.queue.end_turn(&mut b.ring);
        change(&mut b);
        assert_eq!(b.turn(), None);
        assert_eq!(b.sent(), [OpCode::Read]);
    }
}

#[test]
fn what_the_file_does_not_give_is_sent() {
    for in_memory in [true, false] {
        let mut b = Bench::new(in_memory);
        b.read(blocks(0, 1));
        b.sent();
        // The file ends before.
        b.tell(7, &[(256, Place::File(0))]);
        assert_eq!(b.read(blocks(15, 2)), None);
        assert_eq!(b.sent(), [OpCode::Read]);
        assert_eq!(b.read(blocks(15, 1)), Some(Ok(vec![15; 4096])));
    }
}

#[test]
fn answers_of_another_grant_are_of_no_use_and_wrong_ones_end_the_link() {
    let mut b = Bench::new(true);
    b.read(blocks(0, 1));
    b.tell(8, &[(256, Place::File(0))]);
    assert!(b.is_linked());
    assert_eq!(b.read(blocks(0, 1)), None);
    b.tell(7, &[(255, Place::File(0)), (1, Place::File(1))]);
    assert!(!b.is_linked(), "there is no such file");
    assert!(b.is_returned(), "the files go with the link");
    let mut b = Bench::new(true);
    b.tell(7, &[(256, Place::File(0))]);
    assert!(!b.is_linked(), "nobody asked");
    let mut b = Bench::new(true);
    b.read(blocks(0, 1));
    b.tell(7, &[(255, Place::File(0))]);
    assert!(!b.is_linked(), "it is too short");
}

#[test]
fn files_are_let_go_of_when_the_grant_is_over() {
    let mut b = Bench::known(true);
    assert!(!b.is_returned());
    b.queue.take(Mail::PlacesOver(A, 2));
    assert!(!b.is_returned(), "another one");
    b.queue.take(Mail::PlacesOver(A, 1));
    assert!(b.is_returned());
    assert_eq!(b.read(blocks(3, 1)), None);
    let mut b = Bench::known(false);
    b.queue.take(Mail::Close(A));
    assert!(b.is_returned());
    // Who has no link has no files.
    let mut b = Bench::known(true);
    b.queue.take(Mail::Close(A));
    let (granted, returned) = granted(2, 8, &b.changes, Vec::new(), &b.session);
    b.queue.take(Mail::Places(A, Box::new(granted)));
    assert_eq!(returned.try_recv(), Err(TryRecvError::Disconnected));
}

/// A replica was stopped when it had granted its files, and was taken out of the volume. Its number is another's by now, and whoever
/// hands grants out only gets to it.
#[test]
fn what_was_granted_in_a_session_that_is_over_is_nobody_elses() {
    let mut b = Bench::known(true);
    let stranger = b.strangers_file();
    let (late, returned) = granted(2, 7, &b.changes, vec![stranger], &Arc::new(()));
    b.queue.take(Mail::Places(A, Box::new(late)));
    assert_eq!(returned.try_recv(), Err(TryRecvError::Disconnected));
    assert_eq!(b.read(blocks(3, 1)), Some(Ok(vec![3; 4096])), "in the file of the one that is linked");
}
