//! An initiator of the iSCSI target: its whole stream, through the login and then the full feature phase, SCSI commands
//! and their parameters included.
//!
//! Input: one byte of circumstances, then PDUs: a header of 48 bytes, additional segments, data padded to 4 bytes.
//!
//! | bits | meaning |
//! |---|---|
//! | 0 | the target asks for CHAP |
//! | 1 | there is no login in the stream |
//! | 2 | nobody may log in at the moment |
//! | 3 | the disk is read-only |
//! | 4 | logical blocks of 4096 bytes |

use std::io;

use iscsi_frontend::login::{Agreed, Established, Existing, Kind, Login, Offer, Progress, SEED};
use iscsi_frontend::pdu::{Basic, HEADER, Raw, ScsiCommand, login_status};
use iscsi_frontend::scsi::command::Cdb;
use iscsi_frontend::scsi::keep::{SaveError, Store};
use iscsi_frontend::scsi::{Claim, Decision, Identity, LbaStatus, LogicalUnit, NexusId, TRANSFER_MAX, Work};
use iscsi_frontend::session::{Request as Taken, Session, Verdict};
use iscsi_frontend::{Chap, Credentials};
use lh_block::{Device, Done, Extent, Geometry, Request};
use lh_ring::Payload;

const SIZE: u64 = 64 << 20;

/// Longest answer to one login request: its text, and the keys that it repeats.
const ANSWER_MAX: usize = 64 << 10;

/// Longest answer to a SCSI command that is no data of the medium.
const REPLY_MAX: usize = 128 << 10;

/// A disk that is looked at and never asked: deciding does no I/O.
struct Disk(Geometry);

impl Device<Payload> for Disk {
    fn geometry(&self) -> Geometry {
        self.0
    }
    fn room(&self) -> u32 {
        0
    }
    fn submit(&mut self, request: Request<Payload>) {
        panic!("{request:?} while deciding");
    }
    fn poll_done(&mut self) -> Option<Done<Payload>> {
        None
    }
}

/// What a reservation leaves behind, in memory.
#[derive(Default)]
struct Memory(Option<Vec<u8>>);

impl Store for Memory {
    fn outlives(&self) -> bool {
        true
    }

    fn load(&mut self) -> io::Result<Option<Vec<u8>>> {
        Ok(self.0.clone())
    }
    fn save(&mut self, bytes: &[u8]) -> Result<(), SaveError> {
        iscsi_frontend::scsi::keep::Kept::decode(bytes).expect("what is kept is read again");
        self.0 = Some(bytes.to_vec());
        Ok(())
    }
}

struct Stream<'a>(&'a [u8]);

impl<'a> Stream<'a> {
    /// The next PDU: header and data segment.
    fn pdu(&mut self) -> Option<(Raw, &'a [u8])> {
        let (raw, rest) = self.0.split_first_chunk::<HEADER>()?;
        let header = Basic::of(raw);
        let rest = rest.get(header.ahs_len()..)?;
        let data = rest.get(..header.data_len())?;
        self.0 = rest.get(header.data_len().next_multiple_of(4)..)?;
        Some((*raw, data))
    }

    fn login(&mut self, chap: Option<&Chap>, closed: u16) -> Option<Established> {
        let existing = Existing { tsih: 7, cid: 0, agreed: Agreed::new() };
        let session_of = |port: &str| port.starts_with("iqn.2020").then_some(existing);
        let offer = Offer {
            target: "iqn.2014-09.io.longhorn:demo",
            chap,
            first_burst: 65536,
            window: 32,
            tsih: 3,
            session_of: &session_of,
            closed,
        };
        let mut login = Login::new([5; SEED]);
        loop {
            let (raw, data) = self.pdu()?;
            let mut out = Vec::new();
            let progress = login.apply(&raw, data, &offer, &mut out);
            assert!(out.len() < ANSWER_MAX, "{} bytes of answer", out.len());
            assert!(
                matches!(progress, Progress::Broken) || out.len() >= HEADER,
                "a request without an answer"
            );
            match progress {
                Progress::More => {}
                Progress::Established(established) => {
                    assert!(closed == login_status::SUCCESS, "a closed target was entered");
                    assert!(!established.initiator.is_empty());
                    return Some(*established);
                }
                Progress::Refused(status) => {
                    assert_ne!(status, login_status::SUCCESS);
                    return None;
                }
                Progress::Broken => return None,
            }
        }
    }
}

struct Unit {
    unit: LogicalUnit,
    nexus: NexusId,
    disk: Disk,
    read_only: bool,
}

impl Unit {
    fn new(read_only: bool, logical_block: u32, port: &str) -> Self {
        let geometry =
            Geometry { size: SIZE, logical_block, physical_block: 4096, max_transfer: 1 << 20, depth: 128 };
        let identity = Identity::of_volume("demo");
        let mut unit =
            LogicalUnit::open(identity, read_only, true, Box::new(Memory::default())).expect("empty");
        let nexus = unit.attach(port);
        unit.watch_size(SIZE);
        Self { unit, nexus, disk: Disk(geometry), read_only }
    }

    fn command(&mut self, command: &ScsiCommand, data: &[u8]) {
        let mut reply = Vec::new();
        let cdb: Cdb = command.cdb;
        let lun = command.lun.get();
        let decision = self.unit.decide(self.nexus, lun, &cdb, &mut self.disk, &mut reply);
        assert!(reply.len() <= REPLY_MAX && (reply.is_empty() || decision == Decision::Good));
        match decision {
            Decision::Good | Decision::Check(_) | Decision::Conflict => {}
            Decision::Parameters(wanted) => {
                assert!(wanted <= 65536, "{wanted} bytes of parameters");
                let list = &data[..data.len().min(wanted as usize)];
                let block = self.disk.0.logical_block;
                let after = self.unit.parameters(self.nexus, &cdb, list, block);
                assert!(!matches!(after, Decision::Parameters(_)), "parameters for parameters");
            }
            Decision::Work(work) => self.check(&work),
        }
        while self.unit.next_to_abort().is_some() {}
    }

    /// What is done to the medium is inside of it, allowed, and bounded.
    fn check(&self, work: &Work) {
        assert!(!(self.read_only && work.is_write()), "{work:?} on a read-only disk");
        assert!(work.data_out() <= 2 * TRANSFER_MAX && work.data_in() <= TRANSFER_MAX, "{work:?}");
        assert!(work.memory() <= TRANSFER_MAX, "{work:?}");
        let inside = |range: Extent| {
            let end = range.offset.checked_add(range.len);
            assert!(end.is_some_and(|end| end <= SIZE), "{work:?}");
            assert!(range.is_aligned(u64::from(self.disk.0.logical_block)), "{work:?}");
        };
        if let Work::Read(range) | Work::LbaStatus(LbaStatus { range, .. }) = work {
            inside(*range);
        }
        if let Claim::Write(range) | Claim::Own(range) = work.claim() {
            inside(range);
        }
    }
}

fn serve(stream: &mut Stream<'_>, established: &Established, unit: &mut Unit) {
    let mut session = Session::new(established, 32);
    while let Some((raw, data)) = stream.pdu() {
        if session.check(&Basic::of(&raw)).is_err() {
            assert!(matches!(session.apply(&raw), Verdict::Close(_)));
            return;
        }
        let before = session.numbers();
        match session.apply(&raw) {
            Verdict::Take(taken) => {
                let immediate = Basic::of(&raw).is_immediate();
                if let Taken::Command(command) = &taken {
                    assert_eq!(established.kind, Kind::Normal, "a command in a discovery session");
                    unit.command(command, data);
                }
                match taken {
                    Taken::DataOut(_) => {}
                    Taken::Task(_) => session.function_answered(immediate),
                    _ => session.answered(immediate),
                }
                session.next_stat_sn();
            }
            Verdict::Ignore => assert_eq!(session.numbers(), before, "an ignored PDU was counted"),
            Verdict::Reject(reason) => assert_ne!(reason, 0),
            Verdict::Close(_) => return,
        }
        let numbers = session.numbers();
        assert!(numbers.max_cmd_sn.wrapping_sub(numbers.exp_cmd_sn).wrapping_add(1) <= 32, "the window grew");
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    let Some((circumstances, rest)) = input.split_first() else { return };
    let on = |bit: u8| circumstances & bit != 0;
    let credentials = |name: &str| Credentials { name: name.into(), secret: b"a secret of sixteen".to_vec() };
    let chap = Chap { initiator: credentials("user"), target: Some(credentials("target")) };
    let mut stream = Stream(rest);
    let established = if on(2) {
        Some(Established {
            initiator: "iqn.2020-01.test:i".into(),
            isid: [0; 6],
            tsih: 0,
            cid: 0,
            kind: Kind::Normal,
            agreed: Agreed::new(),
            cmd_sn: 1,
            stat_sn: 1,
        })
    } else {
        let closed = if on(4) { login_status::UNAVAILABLE } else { login_status::SUCCESS };
        stream.login(on(1).then_some(&chap), closed)
    };
    let Some(established) = established else { return };
    let mut unit = Unit::new(on(8), if on(16) { 4096 } else { 512 }, &established.port());
    serve(&mut stream, &established, &mut unit);
}
