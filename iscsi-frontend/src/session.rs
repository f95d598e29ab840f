//! A session in the full feature phase: which PDUs it takes, and how they are counted (RFC 7143, 4.2.2).
//!
//! A pure machine. One connection per session: commands come in order, so one that leaves a gap means that the initiator
//! and the target disagree, and the connection ends. Phases:
//!
//! | phase | takes | goes to |
//! |---|---|---|
//! | `Open` | everything | `LogoutAsked` (the target wants to stop), `LoggedOut` (a logout) |
//! | `LogoutAsked` | everything; commands are refused above | `LoggedOut` |
//! | `LoggedOut` | nothing | - |

use crate::login::{Established, Kind, RECV_SEGMENT_MAX};
use crate::pdu::{
    Basic, DataOut, LogoutRequest, NO_TAG, Raw, ScsiCommand, TaskRequest, TextRequest, opcode, reject,
};

/// Immediate requests that may wait for an answer, beside the window; and so many task management functions beside those.
pub(crate) const IMMEDIATE_MAX: u32 = 8;

/// How far a session has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Serves.
    Open,
    /// The initiator has been asked to log out.
    LogoutAsked,
    /// A logout has been taken: nothing is read any more.
    LoggedOut,
}

/// A PDU that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// A SCSI command.
    Command(ScsiCommand),
    /// Data of a command.
    DataOut(DataOut),
    /// A ping, or the answer to one.
    Nop(TextRequest),
    /// Text: SendTargets.
    Text(TextRequest),
    /// Task management.
    Task(TaskRequest),
    /// Logout.
    Logout(LogoutRequest),
}

/// Why a connection cannot go on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// More bytes than were declared to be taken.
    #[error("data segment of {0} bytes")]
    TooLong(usize),
    /// An operation that has no place here.
    #[error("operation {0:#04x} in this phase")]
    Misplaced(u8),
    /// Commands are missing that nobody can send any more.
    #[error("command {found} where {expected} should have come")]
    Gap {
        /// The number that should have come.
        expected: u32,
        /// The one that came.
        found: u32,
    },
    /// A digest that does not match.
    #[error("digest error")]
    Digest,
    /// Unsolicited data beyond what was agreed on.
    #[error("more unsolicited data than agreed")]
    Unsolicited,
}

/// What becomes of a PDU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is to be served.
    Take(Request),
    /// It is dropped without a word, as the RFC wants it (4.2.2.1).
    Ignore,
    /// It is answered with a Reject of this reason.
    Reject(u8),
    /// The connection ends.
    Close(Broken),
}

/// Why a logout is refused (11.15.1). The session goes on as if it had not come.
mod logout {
    /// There is no connection of this number.
    pub(super) const NO_CONNECTION: u8 = 1;
    /// There is no other connection that could recover this one.
    pub(super) const RECOVERY_UNSUPPORTED: u8 = 2;
}

/// Numbers that go into every PDU to the initiator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// The next command that is expected.
    pub exp_cmd_sn: u32,
    /// The last one that is taken.
    pub max_cmd_sn: u32,
}

/// The state of one session.
#[derive(Debug)]
pub struct Session {
    kind: Kind,
    /// The number of its connection.
    cid: u16,
    phase: Phase,
    exp_cmd_sn: u32,
    max_cmd_sn: u32,
    stat_sn: u32,
    /// Immediate requests without an answer, and immediate task management: each has its own room (4.2.2.1).
    immediate: u32,
    functions: u32,
}

impl Session {
    /// The session after its login, which may have `window` commands at a time.
    pub fn new(established: &Established, window: u32) -> Self {
        Self {
            kind: established.kind,
            cid: established.cid,
            phase: Phase::Open,
            exp_cmd_sn: established.cmd_sn,
            max_cmd_sn: established.cmd_sn.wrapping_add(window).wrapping_sub(1),
            stat_sn: established.stat_sn,
            immediate: 0,
            functions: 0,
        }
    }

    /// How far it has come.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Kind of session.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// A header has come, its data still to be read.
    ///
    /// # Errors
    /// [`Broken`]: what comes can be no PDU of this session.
    pub fn check(&self, header: &Basic) -> Result<(), Broken> {
        if header.data_len() > RECV_SEGMENT_MAX as usize {
            return Err(Broken::TooLong(header.data_len()));
        }
        let misplaced = match header.code() {
            opcode::SCSI_COMMAND => false,
            // A login has no place behind the login; the rest are the target's own operations.
            opcode::LOGIN_REQUEST => true,
            code => header.ahs != 0 || (code & 0x20 != 0),
        };
        if misplaced { Err(Broken::Misplaced(header.code())) } else { Ok(()) }
    }

    /// A whole PDU has come.
    pub fn apply(&mut self, raw: &Raw) -> Verdict {
        let header = Basic::of(raw);
        if let Err(broken) = self.check(&header) {
            return Verdict::Close(broken);
        }
        if self.phase == Phase::LoggedOut {
            return Verdict::Ignore;
        }
        let request = match header.code() {
            // Has no number of its own: it belongs to a command, of which there is none.
            opcode::DATA_OUT if self.kind == Kind::Discovery => {
                return Verdict::Reject(reject::NOT_SUPPORTED);
            }
            opcode::DATA_OUT => return Verdict::Take(Request::DataOut(zerocopy::transmute!(*raw))),
            opcode::SCSI_COMMAND => Request::Command(zerocopy::transmute!(*raw)),
            opcode::NOP_OUT => Request::Nop(zerocopy::transmute!(*raw)),
            opcode::TEXT_REQUEST => Request::Text(zerocopy::transmute!(*raw)),
            opcode::TASK_REQUEST => Request::Task(zerocopy::transmute!(*raw)),
            opcode::LOGOUT_REQUEST => Request::Logout(zerocopy::transmute!(*raw)),
            // Nothing is kept to be sent again at error recovery level 0.
            opcode::SNACK => return Verdict::Reject(reject::SNACK),
            _ => return Verdict::Reject(reject::NOT_SUPPORTED),
        };
        let [.., a, b, c, d] = raw[..28] else { return Verdict::Ignore };
        self.count(&header, u32::from_be_bytes([a, b, c, d]), request)
    }

    /// Counts what takes part in the order of commands.
    fn count(&mut self, header: &Basic, cmd_sn: u32, request: Request) -> Verdict {
        if header.is_immediate() {
            // The answer to a ping of ours: nobody waits for anything.
            let answer = matches!(request, Request::Nop(_)) && header.itt.get() == NO_TAG;
            let is_function = matches!(request, Request::Task(_));
            let open = if is_function { &mut self.functions } else { &mut self.immediate };
            if !answer && *open >= IMMEDIATE_MAX {
                return Verdict::Reject(reject::TOO_MANY_IMMEDIATE);
            }
            *open += u32::from(!answer);
        } else {
            let ahead = cmd_sn.wrapping_sub(self.exp_cmd_sn);
            let room = self.max_cmd_sn.wrapping_sub(self.exp_cmd_sn);
            let full = room == u32::MAX;
            match ahead {
                _ if full => return Verdict::Ignore,
                0 => self.exp_cmd_sn = self.exp_cmd_sn.wrapping_add(1),
                ahead if ahead <= room => {
                    return Verdict::Close(Broken::Gap { expected: self.exp_cmd_sn, found: cmd_sn });
                }
                _ => return Verdict::Ignore,
            }
        }
        let immediate = header.is_immediate();
        match &request {
            // A session for discovery has nothing but text and its end (4.3).
            Request::Task(_) if self.kind == Kind::Discovery => {
                self.function_answered(immediate);
                return Verdict::Reject(reject::NOT_SUPPORTED);
            }
            Request::Command(_) if self.kind == Kind::Discovery => {
                self.answered(immediate);
                return Verdict::Reject(reject::NOT_SUPPORTED);
            }
            // There is no such reason.
            Request::Logout(logout) if logout.reason & 0x7f > 2 => {
                self.answered(immediate);
                return Verdict::Reject(reject::INVALID_FIELD);
            }
            Request::Logout(logout) if self.refusal(logout).is_none() => self.phase = Phase::LoggedOut,
            _ => {}
        }
        Verdict::Take(request)
    }

    /// The response of a logout that is refused: of another connection than this one, or for recovery (11.14, 11.15.1).
    /// `None` if it ends the session: its connection is its only one, and no number belongs to the session's own logout.
    pub fn refusal(&self, logout: &LogoutRequest) -> Option<u8> {
        match logout.reason & 0x7f {
            0 => None,
            1 if logout.cid.get() == self.cid => None,
            1 => Some(logout::NO_CONNECTION),
            _ => Some(logout::RECOVERY_UNSUPPORTED),
        }
    }

    /// A request that was taken has its answer, or gets none: there is room for another. Not for task management.
    pub fn answered(&mut self, immediate: bool) {
        if immediate {
            self.immediate = self.immediate.saturating_sub(1);
        } else {
            self.max_cmd_sn = self.max_cmd_sn.wrapping_add(1);
        }
    }

    /// The same for task management.
    pub fn function_answered(&mut self, immediate: bool) {
        if immediate {
            self.functions = self.functions.saturating_sub(1);
        } else {
            self.answered(false);
        }
    }

    /// The target wants to stop. False if the initiator knows already or has logged out.
    pub fn ask_for_logout(&mut self) -> bool {
        let asks = self.phase == Phase::Open;
        if asks {
            self.phase = Phase::LogoutAsked;
        }
        asks
    }

    /// Numbers for a PDU to the initiator.
    pub fn numbers(&self) -> Numbers {
        Numbers { exp_cmd_sn: self.exp_cmd_sn, max_cmd_sn: self.max_cmd_sn }
    }

    /// The number of the next status, which is not used up.
    pub fn stat_sn(&self) -> u32 {
        self.stat_sn
    }

    /// The number of a status that is being sent.
    pub fn next_stat_sn(&mut self) -> u32 {
        let now = self.stat_sn;
        self.stat_sn = now.wrapping_add(1);
        now
    }
}

#[cfg(test)]
mod tests;
