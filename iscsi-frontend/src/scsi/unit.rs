//! The logical unit: what each command comes to, for whom.
//!
//! It knows initiator ports ("nexuses", by name), not what carries their commands. It decides about a command at once
//! and does no I/O: what is to be done to the medium it gives back as [`Work`].

mod blocks;
mod report;

use lh_block::Device;
use lh_ring::Payload;
use tracing::{info, warn};

use super::command::{Access, Cdb, Command, action, be32, opcode};
use super::inquiry::{Identity, Place, inquiry, report_opcodes};
use super::keep::{Kept, SaveError, Store, Unreadable};
use super::lba_status::LbaStatus;
use super::mode::{Modes, mode_select, mode_sense, select_length};
use super::reservation::{LIST_MAX, Refusal, asks_to_outlive, out};
use super::sense::{self, Sense};
use super::work::Work;

/// Unit attentions that wait for one initiator; later ones push the oldest out, which a reset would have told as well.
const ATTENTIONS_MAX: usize = 8;

/// Number of the disk. Longhorn's target has its controller at 0 and the volume at 1.
pub const DISK_LUN: u8 = 1;

/// An initiator port that is logged in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NexusId(u16);

/// How a command ends, or what it needs first.
#[derive(Debug, PartialEq, Eq)]
pub enum Decision {
    /// Status GOOD. The reply, if there is one, is in the buffer given.
    Good,
    /// Status CHECK CONDITION.
    Check(Sense),
    /// Status RESERVATION CONFLICT.
    Conflict,
    /// So many bytes of parameters, which then go to [`LogicalUnit::parameters`].
    Parameters(u32),
    /// Something to do to the medium, after its data has come.
    Work(Work),
}

impl From<Sense> for Decision {
    fn from(sense: Sense) -> Self {
        Self::Check(sense)
    }
}

/// What a reset reaches (SAM-5, 6.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reset {
    /// LOGICAL UNIT RESET.
    Unit,
    /// Of the whole target.
    Target,
}

#[derive(Debug)]
struct Nexus {
    port: String,
    attentions: Vec<Sense>,
    /// PREVENT of PREVENT ALLOW MEDIUM REMOVAL.
    prevents: bool,
}

/// A disk, the controller at number 0, and what initiators have made of them.
pub struct LogicalUnit {
    identity: Identity,
    read_only: bool,
    kept: Kept,
    store: Box<dyn Store>,
    /// What the store has may be a change that was refused. Nobody is told of what is kept until it is saved again.
    in_doubt: bool,
    nexuses: Vec<Option<Nexus>>,
    /// Who holds the old reservation (SPC-2, RESERVE).
    reserved: Option<NexusId>,
    /// Ports whose commands PREEMPT AND ABORT wants ended.
    to_abort: Vec<String>,
    /// The size that initiators know.
    size: u64,
    stopping: bool,
}

impl std::fmt::Debug for LogicalUnit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogicalUnit").field("identity", &self.identity).finish_non_exhaustive()
    }
}

/// Why a unit cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// What is kept cannot be read.
    #[error("reservations cannot be read: {0}")]
    Store(#[from] std::io::Error),
    /// What is kept is damaged: who may write is not known. The file must be removed by hand, after making sure that no
    /// cluster relies on its reservations.
    #[error("the file of reservations is damaged: {0}; remove it when no initiator relies on reservations")]
    Unreadable(#[from] Unreadable),
}

impl LogicalUnit {
    /// A unit with what its store keeps. `write_cache` is WCE for a unit that nothing is kept of.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(
        identity: Identity,
        read_only: bool,
        write_cache: bool,
        mut store: Box<dyn Store>,
    ) -> Result<Self, OpenError> {
        let kept = match store.load()? {
            Some(bytes) => Kept::decode(&bytes)?,
            None => Kept {
                modes: Modes { write_cache, protected: false },
                reservations: super::reservation::Reservations::default(),
            },
        };
        Ok(Self {
            identity,
            read_only,
            kept,
            store,
            in_doubt: false,
            nexuses: Vec::new(),
            reserved: None,
            to_abort: Vec::new(),
            size: 0,
            stopping: false,
        })
    }

    /// An initiator port has come. Its first command is told so (POWER ON, RESET, OR BUS DEVICE RESET OCCURRED).
    pub fn attach(&mut self, port: &str) -> NexusId {
        let nexus =
            Nexus { port: port.to_owned(), attentions: Vec::with_capacity(ATTENTIONS_MAX), prevents: false };
        let free = self.nexuses.iter().position(Option::is_none).unwrap_or_else(|| {
            self.nexuses.push(None);
            self.nexuses.len() - 1
        });
        self.nexuses[free] = Some(nexus);
        let id = NexusId(u16::try_from(free).unwrap_or(u16::MAX));
        self.attention(id, sense::POWER_ON);
        id
    }

    /// The initiator port has gone (I_T nexus loss: SAM-5, 6.3.4). Its old-style reservation goes with it, a persistent
    /// one stays.
    pub fn detach(&mut self, nexus: NexusId) {
        if self.reserved == Some(nexus) {
            self.reserved = None;
        }
        if let Some(place) = self.nexuses.get_mut(usize::from(nexus.0)) {
            *place = None;
        }
    }

    /// Commands of an initiator port have ended without an answer, though it has not gone (RFC 7143, 11.14.5).
    pub fn cleared(&mut self, nexus: NexusId) {
        self.attention(nexus, sense::COMMANDS_CLEARED);
    }

    /// The unit or the target has been reset: all initiators are told.
    pub fn reset(&mut self, reset: Reset) {
        self.reserved = None;
        let sense = match reset {
            Reset::Unit => sense::UNIT_RESET,
            Reset::Target => sense::TARGET_RESET,
        };
        for index in 0..self.nexuses.len() {
            let id = NexusId(u16::try_from(index).unwrap_or(u16::MAX));
            if let Some(nexus) = self.nexuses[index].as_mut() {
                nexus.prevents = false;
                self.attention(id, sense);
            }
        }
    }

    /// False where a write is answered only once it is on stable storage.
    pub fn has_write_cache(&self) -> bool {
        self.kept.modes.write_cache
    }

    /// Every command is refused from now on, until the target has ended.
    pub fn stop(&mut self) {
        self.stopping = true;
    }

    /// Looks whether the volume has grown, and tells the initiators.
    pub fn watch_size(&mut self, size: u64) {
        if self.size == size {
            return;
        }
        if self.size != 0 {
            info!(from = self.size, to = size, "the capacity has changed");
            for index in 0..self.nexuses.len() {
                self.attention(NexusId(u16::try_from(index).unwrap_or(u16::MAX)), sense::CAPACITY_CHANGED);
            }
        }
        self.size = size;
    }

    /// A port whose commands PREEMPT AND ABORT wants ended; called until there is none.
    pub fn next_to_abort(&mut self) -> Option<String> {
        self.to_abort.pop()
    }

    fn attention(&mut self, nexus: NexusId, sense: Sense) {
        let Some(Some(nexus)) = self.nexuses.get_mut(usize::from(nexus.0)) else { return };
        if !nexus.attentions.contains(&sense) {
            if nexus.attentions.len() == ATTENTIONS_MAX {
                nexus.attentions.remove(0);
            }
            nexus.attentions.push(sense);
        }
    }

    fn attention_of(&mut self, nexus: NexusId) -> Option<Sense> {
        let nexus = self.nexuses.get_mut(usize::from(nexus.0))?.as_mut()?;
        if nexus.attentions.is_empty() { None } else { Some(nexus.attentions.remove(0)) }
    }

    fn port_of(&self, nexus: NexusId) -> &str {
        self.nexuses.get(usize::from(nexus.0)).and_then(Option::as_ref).map_or("", |n| &n.port)
    }

    /// What a command comes to. `reply` is empty, and gets what is to be sent with status GOOD.
    pub fn decide(
        &mut self,
        nexus: NexusId,
        lun: u64,
        cdb: &Cdb,
        device: &mut dyn Device<Payload>,
        reply: &mut Vec<u8>,
    ) -> Decision {
        let place = place_of(lun);
        let decided = self.admit(nexus, place, cdb).and_then(|()| match cdb[0] {
            opcode::READ_10 | opcode::WRITE_10 | opcode::READ_16 | opcode::WRITE_16 => {
                self.read_or_write(cdb, &device.geometry())
            }
            _ => self.act(nexus, place, cdb, device, reply),
        });
        let decision = decided.unwrap_or_else(|decision| decision);
        if decision != Decision::Good {
            reply.clear();
        }
        decision
    }

    /// What comes before the command itself is looked at (SAM-5, 5.14; SPC-4, 5.13.1).
    fn admit(&mut self, nexus: NexusId, place: Place, cdb: &Cdb) -> Result<(), Decision> {
        let command = Command::of(cdb);
        if !matches!(cdb[0], opcode::INQUIRY | opcode::REPORT_LUNS | opcode::REQUEST_SENSE) {
            if self.stopping {
                return Err(sense::STOPPING.into());
            }
            if place == Place::Nowhere {
                return Err(sense::NO_UNIT.into());
            }
            if place == Place::Disk
                && let Some(attention) = self.attention_of(nexus)
            {
                return Err(attention.into());
            }
        }
        let command = command?;
        let on_controller = matches!(
            cdb[0],
            opcode::INQUIRY | opcode::REPORT_LUNS | opcode::REQUEST_SENSE | opcode::TEST_UNIT_READY
        );
        if place == Place::Controller && !on_controller {
            return Err(sense::INVALID_OPCODE.at_cdb(0).into());
        }
        if place == Place::Disk && !self.may(nexus, command.access, cdb) {
            return Err(Decision::Conflict);
        }
        Ok(command.check(cdb)?)
    }

    /// True unless a reservation of somebody else forbids it.
    fn may(&self, nexus: NexusId, access: Access, cdb: &Cdb) -> bool {
        if self.reserved.is_some_and(|holder| holder != nexus) {
            // SPC-2, table 10.
            return matches!(
                cdb[0],
                opcode::INQUIRY | opcode::REPORT_LUNS | opcode::REQUEST_SENSE | opcode::RELEASE_6
            ) || (cdb[0] == opcode::PREVENT_ALLOW && cdb[4] & 3 == 0);
        }
        if self.kept.reservations.holder.is_none() {
            return true;
        }
        let port = self.port_of(nexus);
        let access = match cdb[0] {
            // Starting disturbs nobody, nor does allowing removal (SBC-3, table 17; SPC-4, table 66).
            opcode::START_STOP_UNIT if cdb[4] & 0xf1 != 0x01 => Access::Changes,
            opcode::PREVENT_ALLOW if cdb[4] & 3 != 0 => Access::Changes,
            _ => access,
        };
        self.kept.reservations.allows(port, access)
    }

    fn act(
        &mut self,
        nexus: NexusId,
        place: Place,
        cdb: &Cdb,
        device: &mut dyn Device<Payload>,
        reply: &mut Vec<u8>,
    ) -> Result<Decision, Decision> {
        let geometry = device.geometry();
        match cdb[0] {
            opcode::TEST_UNIT_READY | opcode::SEND_DIAGNOSTIC => {}
            opcode::REQUEST_SENSE => self.request_sense(nexus, place, cdb, reply)?,
            opcode::INQUIRY => inquiry(cdb, place, &self.identity, &geometry, reply)?,
            opcode::REPORT_LUNS => report::report_luns(cdb, reply)?,
            opcode::MAINTENANCE_IN => {
                report_opcodes(cdb, reply)?;
                reply.truncate(be32(cdb, 6) as usize);
            }
            opcode::MODE_SENSE_6 | opcode::MODE_SENSE_10 => {
                let blocks = geometry.size / u64::from(geometry.logical_block);
                let size = (blocks, geometry.logical_block);
                self.settle()?;
                mode_sense(cdb, self.kept.modes, self.read_only, size, reply)?;
            }
            opcode::MODE_SELECT_6 | opcode::MODE_SELECT_10 => {
                return Ok(Decision::Parameters(select_length(cdb)?));
            }
            opcode::READ_CAPACITY_10 => report::read_capacity_10(cdb, &geometry, reply)?,
            opcode::SERVICE_ACTION_IN_16 if cdb[1] & 0x1f == action::READ_CAPACITY_16 => {
                report::read_capacity_16(cdb, &geometry, reply)?;
            }
            opcode::SERVICE_ACTION_IN_16 => {
                return Ok(Decision::Work(Work::LbaStatus(LbaStatus::of(cdb, &geometry)?)));
            }
            opcode::RESERVE_6 => return self.reserve(nexus),
            opcode::RELEASE_6 => {
                if self.reserved == Some(nexus) {
                    self.reserved = None;
                }
            }
            opcode::PERSISTENT_RESERVE_IN => {
                self.settle()?;
                self.kept.reservations.report(cdb, self.store.outlives(), reply);
            }
            opcode::PERSISTENT_RESERVE_OUT => {
                let length = be32(cdb, 5);
                if length > LIST_MAX {
                    return Err(sense::PARAMETER_LIST_LENGTH.into());
                }
                return Ok(Decision::Parameters(length));
            }
            opcode::PREVENT_ALLOW => {
                if let Some(Some(nexus)) = self.nexuses.get_mut(usize::from(nexus.0)) {
                    nexus.prevents = cdb[4] & 1 != 0;
                }
            }
            // Stopping a unit writes its cache back (SBC-3, 5.25). There is nothing to spin, load or eject.
            opcode::START_STOP_UNIT if cdb[4] & 0xf5 == 0 => return Ok(Decision::Work(Work::Flush)),
            opcode::START_STOP_UNIT => {}
            _ => return self.on_blocks(cdb, &geometry),
        }
        Ok(Decision::Good)
    }

    fn request_sense(
        &mut self,
        nexus: NexusId,
        place: Place,
        cdb: &Cdb,
        reply: &mut Vec<u8>,
    ) -> Result<(), Sense> {
        // DESC: descriptor format is not offered.
        if cdb[1] & 1 != 0 {
            return Err(sense::INVALID_FIELD.at_cdb(1));
        }
        let sense = match place {
            Place::Nowhere => sense::NO_UNIT,
            Place::Controller => sense::NOTHING,
            Place::Disk => self.attention_of(nexus).unwrap_or(sense::NOTHING),
        };
        reply.extend_from_slice(&sense.encode());
        reply.truncate(usize::from(cdb[4]));
        Ok(())
    }

    /// RESERVE (SPC-2, 7.21).
    fn reserve(&mut self, nexus: NexusId) -> Result<Decision, Decision> {
        // Not beside persistent reservations (SPC-4, 5.13.3).
        if !self.kept.reservations.is_empty() {
            return Err(Decision::Conflict);
        }
        self.reserved = Some(nexus);
        Ok(Decision::Good)
    }

    /// The parameters of a command that wanted some have come, of a unit with blocks of `block` bytes. What it comes to may be [`Work`]
    /// without data, before the answer.
    pub fn parameters(&mut self, nexus: NexusId, cdb: &Cdb, list: &[u8], block: u32) -> Decision {
        match cdb[0] {
            opcode::MODE_SELECT_6 | opcode::MODE_SELECT_10 => self.select(nexus, cdb, list, block),
            _ => self.persistent_reserve(nexus, cdb, list),
        }
    }

    fn select(&mut self, nexus: NexusId, cdb: &Cdb, list: &[u8], block: u32) -> Decision {
        let modes = match mode_select(cdb, list, self.kept.modes, block) {
            Ok(modes) if modes == self.kept.modes => {
                return self.settle().map_or_else(Decision::from, |()| Decision::Good);
            }
            Ok(modes) => modes,
            Err(sense) => return sense.into(),
        };
        let next = Kept { modes, reservations: self.kept.reservations.clone() };
        let cached = self.kept.modes.write_cache && !modes.write_cache;
        if let Err(sense) = self.keep(next) {
            return sense.into();
        }
        for index in 0..self.nexuses.len() {
            let other = NexusId(u16::try_from(index).unwrap_or(u16::MAX));
            if other != nexus {
                self.attention(other, sense::MODE_CHANGED);
            }
        }
        // Nobody flushes any more what was written until now.
        if cached { Work::Flush.into() } else { Decision::Good }
    }

    fn persistent_reserve(&mut self, nexus: NexusId, cdb: &Cdb, list: &[u8]) -> Decision {
        if let Some(at) = asks_to_outlive(cdb, list).filter(|_| !self.store.outlives()) {
            return sense::INVALID_PARAMETER.at_parameter(at).into();
        }
        let port = self.port_of(nexus).to_owned();
        let mut next = self.kept.clone();
        let effects = match next.reservations.change(&port, cdb, list) {
            Ok(effects) => effects,
            Err(Refusal::Conflict) => return Decision::Conflict,
            Err(Refusal::Check(sense)) => return sense.into(),
        };
        if let Err(sense) = self.keep(next) {
            return sense.into();
        }
        for (port, sense) in effects.attentions {
            let found = self.nexuses.iter().position(|n| n.as_ref().is_some_and(|n| n.port == port));
            if let Some(index) = found.and_then(|index| u16::try_from(index).ok()) {
                self.attention(NexusId(index), sense);
            }
        }
        if cdb[1] & 0x1f == out::PREEMPT_AND_ABORT {
            self.to_abort = effects.aborted;
        }
        Decision::Good
    }

    /// Makes a new state durable, then takes it over.
    fn keep(&mut self, next: Kept) -> Result<(), Sense> {
        self.settle()?;
        if next == self.kept {
            return Ok(());
        }
        let Err(e) = self.store.save(&next.encode()) else {
            self.kept = next;
            return Ok(());
        };
        warn!("reservations and modes are not saved, and not changed: {e}");
        self.in_doubt = matches!(e, SaveError::Unknown(_));
        // At once, so that what was refused does not come true with the next start. If that fails, too, before the next word.
        let _ = self.settle();
        Err(sense::INTERNAL)
    }

    /// Saves what holds, if something else may be saved.
    fn settle(&mut self) -> Result<(), Sense> {
        if !self.in_doubt {
            return Ok(());
        }
        self.store.save(&self.kept.encode()).map_err(|e| {
            warn!("reservations and modes as they hold are not saved: {e}: nobody is told of them");
            sense::INTERNAL
        })?;
        self.in_doubt = false;
        Ok(())
    }
}

impl From<Work> for Decision {
    fn from(work: Work) -> Self {
        Self::Work(work)
    }
}

/// Whom a logical unit number means (SAM-5, 4.7): single-level, peripheral or flat addressing of bus 0.
pub(crate) fn place_of(lun: u64) -> Place {
    let [first, number, rest @ ..] = lun.to_be_bytes();
    let known = (first == 0 || first == 0x40) && rest == [0; 6];
    match number {
        0 if known => Place::Controller,
        DISK_LUN if known => Place::Disk,
        _ => Place::Nowhere,
    }
}

#[cfg(test)]
mod tests;
