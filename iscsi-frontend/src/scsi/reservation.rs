//! Persistent reservations (SPC-4, 5.13, 6.15 and 6.16): who may use the unit, however often it comes and goes.
//!
//! A pure machine over the names of initiator ports. A change is made on a copy, which the caller makes durable before
//! it takes it over: an acknowledged registration outlives the process, a failed one has never been.

use super::command::{Access, Cdb, be16, be32, be64};
use super::sense::{
    INVALID_FIELD, INVALID_PARAMETER, INVALID_RELEASE, NO_REGISTRATIONS, PARAMETER_LIST_LENGTH,
    REGISTRATION_PREEMPTED, RESERVATION_PREEMPTED, RESERVATION_RELEASED, Sense,
};

/// Registrations that are kept: clusters have a few dozen nodes, each with a path or two.
pub const REGISTRATIONS_MAX: usize = 64;

/// Longest name of an initiator port: an iSCSI name of 223 bytes (RFC 7143, 4.2.7.1), and `,i,0x` with 12 digits.
pub const PORT_MAX: usize = 223 + 17;

/// What stands between an initiator's name and its ISID, and how many digits that has (SPC-4, 7.6.4.6).
const SEPARATOR: &str = ",i,0x";
const ISID_DIGITS: usize = 12;

/// Bytes of the basic parameter list (SPC-4, 6.16.3).
const BASIC_LIST: usize = 24;

/// Longest parameter list: that of REGISTER AND MOVE with the longest name.
pub(crate) const LIST_MAX: u32 = 24 + 4 + 256;

/// Service actions of PERSISTENT RESERVE OUT (SPC-4, table 232).
pub mod out {
    #![expect(missing_docs, reason = "the names are the standard's")]
    pub const REGISTER: u8 = 0;
    pub const RESERVE: u8 = 1;
    pub const RELEASE: u8 = 2;
    pub const CLEAR: u8 = 3;
    pub const PREEMPT: u8 = 4;
    pub const PREEMPT_AND_ABORT: u8 = 5;
    pub const REGISTER_AND_IGNORE: u8 = 6;
    pub const REGISTER_AND_MOVE: u8 = 7;
}

/// Kinds of reservations (SPC-4, table 60).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Only the holder writes.
    WriteExclusive = 1,
    /// Only the holder reads and writes.
    ExclusiveAccess = 3,
    /// Only who is registered writes.
    WriteExclusiveRegistrants = 5,
    /// Only who is registered reads and writes.
    ExclusiveAccessRegistrants = 6,
    /// As `WriteExclusiveRegistrants`, and all of them hold it.
    WriteExclusiveAll = 7,
    /// As `ExclusiveAccessRegistrants`, and all of them hold it.
    ExclusiveAccessAll = 8,
}

impl Kind {
    /// The kind of this number.
    pub const fn of(number: u8) -> Option<Self> {
        Some(match number {
            1 => Self::WriteExclusive,
            3 => Self::ExclusiveAccess,
            5 => Self::WriteExclusiveRegistrants,
            6 => Self::ExclusiveAccessRegistrants,
            7 => Self::WriteExclusiveAll,
            8 => Self::ExclusiveAccessAll,
            _ => return None,
        })
    }

    const fn is_all(self) -> bool {
        matches!(self, Self::WriteExclusiveAll | Self::ExclusiveAccessAll)
    }

    /// Every registered initiator may do what the holder may.
    const fn admits_registered(self) -> bool {
        !matches!(self, Self::WriteExclusive | Self::ExclusiveAccess)
    }

    const fn excludes_reads(self) -> bool {
        matches!(self, Self::ExclusiveAccess | Self::ExclusiveAccessRegistrants | Self::ExclusiveAccessAll)
    }
}

/// An initiator port and its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Name of the initiator port: `NAME,i,0xISID`.
    pub port: String,
    /// Reservation key, never 0.
    pub key: u64,
}

/// Registrations, and the reservation that one or all of them hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reservations {
    /// PRGENERATION: counts changes of registrations.
    pub generation: u32,
    /// In the order in which they came.
    pub registrations: Vec<Registration>,
    /// The kind, and who made the reservation.
    pub holder: Option<(Kind, String)>,
    /// Activate Persist Through Power Loss, as the last registration said.
    pub aptpl: bool,
}

/// Why a service action was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Status RESERVATION CONFLICT.
    Conflict,
    /// Status CHECK CONDITION.
    Check(Sense),
}

impl From<Sense> for Refusal {
    fn from(sense: Sense) -> Self {
        Self::Check(sense)
    }
}

/// What others feel of a service action.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Effects {
    /// Unit attentions for initiator ports.
    pub attentions: Vec<(String, Sense)>,
    /// Ports whose commands are to be aborted.
    pub aborted: Vec<String>,
}

impl Reservations {
    /// Whether a port may use a command beside the reservation.
    pub fn allows(&self, port: &str, access: Access) -> bool {
        let Some((kind, _)) = &self.holder else { return true };
        match access {
            Access::Free | Access::Own => true,
            Access::Reads if !kind.excludes_reads() => true,
            Access::Reads | Access::Changes => {
                self.holds(port) || (kind.admits_registered() && self.key_of(port).is_some())
            }
        }
    }

    /// True if this port holds the reservation.
    pub fn holds(&self, port: &str) -> bool {
        match &self.holder {
            Some((kind, _)) if kind.is_all() => self.key_of(port).is_some(),
            Some((_, holder)) => holder == port,
            None => false,
        }
    }

    /// The key of a port, if it is registered.
    pub fn key_of(&self, port: &str) -> Option<u64> {
        self.registrations.iter().find(|r| r.port == port).map(|r| r.key)
    }

    /// True if nothing is registered.
    pub fn is_empty(&self) -> bool {
        self.registrations.is_empty()
    }

    /// Does a service action of PERSISTENT RESERVE OUT.
    ///
    /// # Errors
    /// [`Refusal`]. What has changed by then is to be thrown away: call it on a copy.
    pub fn change(&mut self, port: &str, cdb: &Cdb, list: &[u8]) -> Result<Effects, Refusal> {
        let action = cdb[1] & 0x1f;
        if action == out::REGISTER_AND_MOVE {
            return self.register_and_move(port, list);
        }
        if list.len() != BASIC_LIST {
            return Err(PARAMETER_LIST_LENGTH.into());
        }
        let (key, new_key, flags) = (be64(list, 0), be64(list, 8), list[20]);
        // SPEC_I_PT and ALL_TG_PT: not offered (REPORT CAPABILITIES says so).
        if flags & 0x0c != 0 {
            return Err(INVALID_PARAMETER.at_parameter(20).into());
        }
        let aptpl = flags & 0x01 != 0;
        match action {
            out::REGISTER => self.register(port, Some(key), new_key, aptpl),
            out::REGISTER_AND_IGNORE => self.register(port, None, new_key, aptpl),
            _ => {
                if self.key_of(port) != Some(key) {
                    return Err(Refusal::Conflict);
                }
                match action {
                    out::RESERVE => self.reserve(port, kind_of(cdb)?),
                    out::RELEASE => self.release(port, kind_of(cdb)?),
                    out::CLEAR => Ok(self.clear(port)),
                    out::PREEMPT => self.preempt(port, new_key, cdb, false),
                    out::PREEMPT_AND_ABORT => self.preempt(port, new_key, cdb, true),
                    _ => Err(INVALID_FIELD.at_cdb(1).into()),
                }
            }
        }
    }

    fn others(&self, port: &str, sense: Sense) -> Vec<(String, Sense)> {
        self.registrations.iter().filter(|r| r.port != port).map(|r| (r.port.clone(), sense)).collect()
    }

    fn register(
        &mut self,
        port: &str,
        key: Option<u64>,
        new_key: u64,
        aptpl: bool,
    ) -> Result<Effects, Refusal> {
        let registered = self.key_of(port);
        if key.is_some_and(|key| key != registered.unwrap_or(0)) {
            return Err(Refusal::Conflict);
        }
        let mut effects = Effects::default();
        match (registered, new_key) {
            (None, 0) => return Ok(effects),
            (None, _) => self.add(port, new_key)?,
            (Some(_), 0) => effects = self.remove(port),
            (Some(_), _) => {
                self.registrations.iter_mut().filter(|r| r.port == port).for_each(|r| r.key = new_key);
            }
        }
        self.aptpl = aptpl;
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    fn add(&mut self, port: &str, key: u64) -> Result<(), Refusal> {
        if self.registrations.len() >= REGISTRATIONS_MAX || port.len() > PORT_MAX {
            return Err(NO_REGISTRATIONS.into());
        }
        self.registrations.push(Registration { port: port.to_owned(), key });
        Ok(())
    }

    /// Unregisters a port; what it alone held is released.
    fn remove(&mut self, port: &str) -> Effects {
        let held = self.holds(port);
        self.registrations.retain(|r| r.port != port);
        let mut effects = Effects::default();
        if let Some((kind, _)) = self.holder
            && held
            && (!kind.is_all() || self.registrations.is_empty())
        {
            self.holder = None;
            if kind.admits_registered() {
                effects.attentions = self.others(port, RESERVATION_RELEASED);
            }
        }
        effects
    }

    fn reserve(&mut self, port: &str, kind: Kind) -> Result<Effects, Refusal> {
        match &self.holder {
            None => self.holder = Some((kind, port.to_owned())),
            Some((held, _)) if self.holds(port) && *held == kind => {}
            Some(_) => return Err(Refusal::Conflict),
        }
        Ok(Effects::default())
    }

    fn release(&mut self, port: &str, kind: Kind) -> Result<Effects, Refusal> {
        let mut effects = Effects::default();
        if self.holds(port) {
            if self.holder.as_ref().is_some_and(|(held, _)| *held != kind) {
                return Err(INVALID_RELEASE.into());
            }
            self.holder = None;
            if kind.admits_registered() {
                effects.attentions = self.others(port, RESERVATION_RELEASED);
            }
        }
        Ok(effects)
    }

    fn clear(&mut self, port: &str) -> Effects {
        let attentions = self.others(port, RESERVATION_PREEMPTED);
        self.registrations.clear();
        self.holder = None;
        self.generation = self.generation.wrapping_add(1);
        Effects { attentions, aborted: Vec::new() }
    }

    /// SPC-4, 5.13.11.4. Who takes the reservation over, or holds it with all others, stays registered. Who only removes registrations
    /// removes its own with those of its key (5.13.11.4.4), and is neither told nor ended.
    fn preempt(&mut self, port: &str, victim: u64, cdb: &Cdb, abort: bool) -> Result<Effects, Refusal> {
        let held = self.holder.clone();
        let takes_over = match &held {
            None => false,
            Some((kind, _)) if kind.is_all() => victim == 0,
            Some((_, holder)) => self.key_of(holder) == Some(victim),
        };
        if victim == 0 && !takes_over {
            return Err(INVALID_PARAMETER.at_parameter(8).into());
        }
        let everybody = takes_over && victim == 0;
        let keeps_own = takes_over || held.as_ref().is_some_and(|(kind, _)| kind.is_all());
        let falls = |r: &Registration| (everybody || r.key == victim) && !(keeps_own && r.port == port);
        if !takes_over && !self.registrations.iter().any(|r| r.key == victim) {
            return Err(Refusal::Conflict);
        }
        let others = self.registrations.iter().filter(|r| falls(r) && r.port != port);
        let fallen: Vec<String> = others.map(|r| r.port.clone()).collect();
        let mut effects = Effects::default();
        effects.attentions.extend(fallen.iter().map(|p| (p.clone(), REGISTRATION_PREEMPTED)));
        self.registrations.retain(|r| !falls(r));
        if takes_over {
            let kind = kind_of(cdb)?;
            if held.is_some_and(|(old, _)| old != kind) {
                effects.attentions.extend(self.others(port, RESERVATION_RELEASED));
            }
            self.holder = Some((kind, port.to_owned()));
        }
        if abort {
            effects.aborted = fallen;
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(effects)
    }

    /// SPC-4, 5.13.8 and 6.16.4.
    fn register_and_move(&mut self, port: &str, list: &[u8]) -> Result<Effects, Refusal> {
        if list.len() < BASIC_LIST || be32(list, 20) as usize != list.len() - BASIC_LIST {
            return Err(PARAMETER_LIST_LENGTH.into());
        }
        let (key, new_key, flags) = (be64(list, 0), be64(list, 8), list[17]);
        let (relative_port, id) = (be16(list, 18), &list[BASIC_LIST..]);
        if self.key_of(port) != Some(key) {
            return Err(Refusal::Conflict);
        }
        let Some((kind, _)) = self.holder.clone().filter(|(kind, _)| self.holds(port) && !kind.is_all())
        else {
            return Err(Refusal::Conflict);
        };
        if new_key == 0 {
            return Err(INVALID_PARAMETER.at_parameter(8).into());
        }
        if relative_port != 1 {
            return Err(INVALID_PARAMETER.at_parameter(18).into());
        }
        let to = &port_of(id).ok_or(INVALID_PARAMETER.at_parameter(24))?;
        if to == port {
            return Err(INVALID_PARAMETER.at_parameter(24).into());
        }
        match self.registrations.iter_mut().find(|r| r.port == *to) {
            Some(r) => r.key = new_key,
            None => self.add(to, new_key)?,
        }
        self.holder = Some((kind, to.clone()));
        self.aptpl = flags & 0x01 != 0;
        if flags & 0x02 != 0 {
            // UNREG.
            self.registrations.retain(|r| r.port != port);
        }
        self.generation = self.generation.wrapping_add(1);
        Ok(Effects::default())
    }

    /// Answers PERSISTENT RESERVE IN: fills `reply`, which is empty, up to the allocation length. `outlives`: the unit can keep
    /// registrations through a loss of power.
    pub fn report(&self, cdb: &Cdb, outlives: bool, reply: &mut Vec<u8>) {
        let scope_and_kind = self.holder.as_ref().map_or(0, |(kind, _)| *kind as u8);
        reply.extend_from_slice(&self.generation.to_be_bytes());
        reply.extend_from_slice(&[0; 4]);
        match cdb[1] & 0x1f {
            // READ KEYS.
            0 => self.registrations.iter().for_each(|r| reply.extend_from_slice(&r.key.to_be_bytes())),
            // READ RESERVATION.
            1 => {
                if let Some((kind, holder)) = &self.holder {
                    let key = if kind.is_all() { 0 } else { self.key_of(holder).unwrap_or(0) };
                    reply.extend_from_slice(&key.to_be_bytes());
                    reply.extend_from_slice(&[0, 0, 0, 0, 0, scope_and_kind, 0, 0]);
                }
            }
            // REPORT CAPABILITIES.
            2 => {
                reply.clear();
                // PTPL_C; TMV, PTPL_A; all six kinds.
                let (can, does) = (u8::from(outlives), u8::from(self.aptpl));
                reply.extend_from_slice(&[0, 8, can, 0x80 | does, 0xea, 0x01, 0, 0]);
                reply.truncate(usize::from(be16(cdb, 7)));
                return;
            }
            // READ FULL STATUS.
            _ => self.registrations.iter().for_each(|r| {
                let holds = self.holds(&r.port);
                reply.extend_from_slice(&r.key.to_be_bytes());
                reply.extend_from_slice(&[
                    0,
                    0,
                    0,
                    0,
                    u8::from(holds),
                    if holds { scope_and_kind } else { 0 },
                ]);
                reply.extend_from_slice(&[0, 0, 0, 0, 0, 1]);
                push_transport_id(&r.port, reply);
            }),
        }
        let length = u32::try_from(reply.len() - 8).unwrap_or(0);
        reply[4..8].copy_from_slice(&length.to_be_bytes());
        reply.truncate(usize::from(be16(cdb, 7)));
    }
}

/// Where a parameter list asks for registrations that outlive a loss of power (SPC-4, 6.16.2: the other service actions ignore it).
pub(crate) fn asks_to_outlive(cdb: &Cdb, list: &[u8]) -> Option<u16> {
    let at = match cdb[1] & 0x1f {
        out::REGISTER | out::REGISTER_AND_IGNORE => 20,
        out::REGISTER_AND_MOVE => 17,
        _ => return None,
    };
    list.get(usize::from(at)).filter(|flags| *flags & 0x01 != 0).map(|_| at)
}

/// The kind that a CDB names, of the scope "logical unit".
fn kind_of(cdb: &Cdb) -> Result<Kind, Refusal> {
    let scope = cdb[2] >> 4;
    Kind::of(cdb[2] & 0x0f).filter(|_| scope == 0).ok_or(Refusal::Check(INVALID_FIELD.at_cdb(2)))
}

/// TransportID of an iSCSI initiator port, with its length before it (SPC-4, 7.6.4.6).
fn push_transport_id(port: &str, reply: &mut Vec<u8>) {
    let name = (port.len() + 1).next_multiple_of(4).max(20);
    let total = u32::try_from(4 + name).unwrap_or(0);
    reply.extend_from_slice(&total.to_be_bytes());
    reply.extend_from_slice(&[0x45, 0]);
    reply.extend_from_slice(&u16::try_from(name).unwrap_or(0).to_be_bytes());
    reply.extend_from_slice(port.as_bytes());
    reply.resize(reply.len() + name - port.len(), 0);
}

/// The initiator port of a TransportID, whose ISID may have capitals among its digits; the names here have none.
fn port_of(id: &[u8]) -> Option<String> {
    let (head, name) = id.split_at_checked(4)?;
    if head[0] != 0x45 || usize::from(be16(head, 2)) != name.len() {
        return None;
    }
    let end = name.iter().position(|b| *b == 0)?;
    let port = std::str::from_utf8(&name[..end]).ok()?;
    let (initiator, isid) = port.rsplit_once(SEPARATOR)?;
    let known = port.len() <= PORT_MAX
        && initiator.bytes().all(|b| b.is_ascii_graphic())
        && isid.len() == ISID_DIGITS
        && isid.bytes().all(|b| b.is_ascii_hexdigit());
    known.then(|| format!("{initiator}{SEPARATOR}{}", isid.to_ascii_lowercase()))
}

#[cfg(test)]
mod tests;
