//! Initiator ports that have a session, or are to go on with one, or whose old commands have not ended.
//!
//! A port logs in again only when the commands of its last session have ended: the session's last command may be a
//! write that the initiator will send again, and after it something newer.

use crate::login::Agreed;
use crate::scsi::NexusId;
use crate::task::Claimant;

/// An initiator port.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) name: String,
    /// Its session and what the SCSI layer calls it; `None` once the session has gone.
    pub(super) session: Option<(Claimant, NexusId)>,
    /// The session's handle.
    pub(super) tsih: u16,
    /// The number of the session's connection.
    pub(super) cid: u16,
    pub(super) agreed: Agreed,
    /// What the SCSI layer calls it while its session has no connection, and is to go on with another one.
    pub(super) kept: Option<NexusId>,
    /// Commands on their way.
    pub(super) tasks: usize,
}

#[derive(Debug, Default)]
pub(super) struct Ports {
    all: Vec<Option<Port>>,
    last_tsih: u16,
}

impl Ports {
    pub(super) fn get(&self, port: u16) -> Option<&Port> {
        self.all.get(usize::from(port))?.as_ref()
    }

    pub(super) fn find(&self, name: &str) -> Option<&Port> {
        self.all.iter().flatten().find(|port| port.name == name)
    }

    /// Number of sessions.
    pub(super) fn sessions(&self) -> usize {
        self.all.iter().flatten().filter(|port| port.session.is_some()).count()
    }

    /// A handle that no session has, and never 0.
    pub(super) fn free_tsih(&self) -> u16 {
        let mut tsih = self.last_tsih;
        loop {
            tsih = tsih.checked_add(1).unwrap_or(1);
            // There are fewer sessions than handles.
            if !self.all.iter().flatten().any(|port| port.tsih == tsih) {
                return tsih;
            }
        }
    }

    /// A port has logged in.
    pub(super) fn insert(&mut self, port: Port) -> u16 {
        self.last_tsih = port.tsih;
        let free = self.all.iter().position(Option::is_none).unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() - 1
        });
        self.all[free] = Some(port);
        u16::try_from(free).unwrap_or(u16::MAX)
    }

    /// A command of a port begins.
    pub(super) fn began(&mut self, port: u16) {
        if let Some(Some(port)) = self.all.get_mut(usize::from(port)) {
            port.tasks += 1;
        }
    }

    /// A command of a port has ended.
    pub(super) fn ended(&mut self, port: u16) {
        if let Some(Some(entry)) = self.all.get_mut(usize::from(port)) {
            entry.tasks -= 1;
            self.tidy(port);
        }
    }

    /// The session of a port has gone: what the SCSI layer called it.
    pub(super) fn leave(&mut self, port: u16) -> Option<NexusId> {
        let (_, nexus) = self.all.get_mut(usize::from(port))?.as_mut()?.session.take()?;
        self.tidy(port);
        Some(nexus)
    }

    /// The connection of a port has gone, and its session is to go on with another one: what the SCSI layer calls it.
    pub(super) fn keep(&mut self, port: u16) -> Option<NexusId> {
        let port = self.all.get_mut(usize::from(port))?.as_mut()?;
        let (_, nexus) = port.session.take()?;
        port.kept = Some(nexus);
        port.kept
    }

    /// Lets go of what was kept of a port, whose commands have ended.
    pub(super) fn take_kept(&mut self, name: &str) -> Option<NexusId> {
        let is_it = |port: &Option<Port>| port.as_ref().is_some_and(|port| port.name == name);
        let at = self.all.iter().position(is_it)?;
        let kept = self.all[at].as_mut()?.kept.take();
        self.tidy(u16::try_from(at).ok()?);
        kept
    }

    fn tidy(&mut self, port: u16) {
        let place = &mut self.all[usize::from(port)];
        let is_over = |port: &Port| port.session.is_none() && port.kept.is_none() && port.tasks == 0;
        if place.as_ref().is_some_and(is_over) {
            *place = None;
        }
    }

    /// The session of a name, if it has one.
    pub(super) fn session_of(&self, name: &str) -> Option<Claimant> {
        self.find(name)?.session.map(|(claimant, _)| claimant)
    }
}
