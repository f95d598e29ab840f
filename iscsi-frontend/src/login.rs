//! Login: who comes, whether it is the one it says, and what both agree on (RFC 7143, chapters 6 and 12).
//!
//! A pure machine: [`Login::apply`] takes a request PDU and writes the response. Stages only go forward:
//!
//! ```text
//!           CSG=0                  CSG=1
//!   Start --------> Security ---------------> Operational ----> established (NSG=3)
//!     |             (CHAP, or nothing)              ^      \--> refused (status class 2 or 3)
//!     +----------------- CSG=1 ---------------------+
//! ```
//!
//! Where CHAP is asked for, nothing leads out of Security but the right response.

mod keys;

use zerocopy::IntoBytes;

use crate::chap::{ALGORITHMS, Algorithm, BINARY_MAX, CHALLENGE, Chap, equal};
use crate::pdu::{Basic, LoginRequest, LoginResponse, Raw, flag, length24, login_status, opcode, padding};
use crate::text::{Malformed, TEXT_MAX, binary, hex, number, pairs, push};

pub use keys::{Agreed, RECV_SEGMENT_MAX};

/// Requests of one login: the longest there is, CHAP with a text in pieces, needs ten.
const REQUESTS_MAX: u32 = 32;

/// Longest iSCSI name (RFC 7143, 4.2.7.1).
const NAME_MAX: usize = 223;

/// The version of the protocol (11.12.4).
const VERSION: u8 = 0;

/// TargetPortalGroupTag: there is one group.
const PORTAL_GROUP: &str = "1";

/// Random bytes that a login needs: an identifier and a challenge.
pub const SEED: usize = 1 + CHALLENGE;

/// What kind of session it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// For commands.
    Normal,
    /// For SendTargets alone.
    Discovery,
}

/// What a login meets.
#[expect(missing_debug_implementations, reason = "borrowed for a call, and holds a function")]
pub struct Offer<'a> {
    /// The target's name.
    pub target: &'a str,
    /// Who may log in. `None`: everybody.
    pub chap: Option<&'a Chap>,
    /// FirstBurstLength that there is room for.
    pub first_burst: u32,
    /// Commands that a session may have at a time.
    pub window: u32,
    /// The handle for a new session.
    pub tsih: u16,
    /// The session that an initiator port has, if it has one.
    pub session_of: &'a dyn Fn(&str) -> Option<Existing>,
    /// Status with which everybody is refused at the moment, 0 for none.
    pub closed: u16,
}

/// A session that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Existing {
    /// Its handle.
    pub tsih: u16,
    /// The number of its connection, which is its only one.
    pub cid: u16,
    /// What was agreed on.
    pub agreed: Agreed,
}

/// A login that has come to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Established {
    /// InitiatorName.
    pub initiator: String,
    /// The initiator's part of the session's name.
    pub isid: [u8; 6],
    /// The handle that was asked for; 0 for a new session.
    pub tsih: u16,
    /// The initiator's number of the connection.
    pub cid: u16,
    /// Kind of session.
    pub kind: Kind,
    /// What was agreed on.
    pub agreed: Agreed,
    /// Sequence number of the first command.
    pub cmd_sn: u32,
    /// Sequence number of the first status after the login.
    pub stat_sn: u32,
}

impl Established {
    /// Name of the initiator port (RFC 7143, 4.4.2): who it is to the SCSI layer.
    pub fn port(&self) -> String {
        let mut port = format!("{},i,", self.initiator);
        port.push_str(&hex(&self.isid));
        port
    }
}

/// What a login has come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The response is to be sent; another request has to come.
    More,
    /// The response is the last one. It is to be sent when the session may begin.
    Established(Box<Established>),
    /// The response says why; then the connection is to be closed.
    Refused(u16),
    /// Not a login request, and none has come before: the connection is to be closed without a word.
    Broken,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Stage {
    Start,
    Security(Proof),
    Operational,
}

/// How far CHAP has come.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Proof {
    /// AuthMethod has not been told.
    Open,
    /// Waits for CHAP_A.
    Method,
    /// Waits for CHAP_N and CHAP_R.
    Challenged(Algorithm),
    /// Nothing more to prove.
    Done,
}

/// A login on its way.
#[derive(Debug)]
pub struct Login {
    seed: [u8; SEED],
    stage: Stage,
    requests: u32,
    /// Of the first request: later ones must be of the same.
    first: Option<LoginRequest>,
    initiator: String,
    kind: Kind,
    agreed: Option<Agreed>,
    /// Own MaxRecvDataSegmentLength has been told.
    declared: bool,
    /// Keys that have come, each of which may come once (6.3). Unknown ones are not kept.
    come: Vec<String>,
    text: Vec<u8>,
    stat_sn: u32,
}

/// A status other than success.
struct Refused(u16);

impl From<Malformed> for Refused {
    fn from(_: Malformed) -> Self {
        Self(login_status::INITIATOR_ERROR)
    }
}

const fn refuse<T>(status: u16) -> Result<T, Refused> {
    Err(Refused(status))
}

impl Login {
    /// A login with random bytes of its own.
    pub fn new(seed: [u8; SEED]) -> Self {
        Self {
            seed,
            stage: Stage::Start,
            requests: 0,
            first: None,
            initiator: String::new(),
            kind: Kind::Normal,
            agreed: None,
            declared: false,
            come: Vec::new(),
            text: Vec::new(),
            stat_sn: 0,
        }
    }

    /// Takes a request and its data segment, and writes the response to `out`.
    pub fn apply(&mut self, raw: &Raw, data: &[u8], offer: &Offer<'_>, out: &mut Vec<u8>) -> Progress {
        let request: LoginRequest = zerocopy::transmute!(*raw);
        if Basic::of(raw).code() != opcode::LOGIN_REQUEST {
            // Before the login has begun there is nobody to be told (6.3).
            let Some(first) = self.first else { return Progress::Broken };
            return self.refused(&first, login_status::INVALID_DURING_LOGIN, out);
        }
        if self.first.is_none() {
            self.stat_sn = request.exp_stat_sn.get();
        }
        let mut text = Vec::new();
        match self.step(&request, data, offer, &mut text) {
            Ok(next) => {
                let over = next == Some(FULL_FEATURE);
                self.respond(&request, next, &text, offer, out);
                if over {
                    Progress::Established(Box::new(self.established(&request)))
                } else {
                    Progress::More
                }
            }
            Err(Refused(status)) => self.refused(&request, status, out),
        }
    }

    fn refused(&self, request: &LoginRequest, status: u16, out: &mut Vec<u8>) -> Progress {
        let response = LoginResponse {
            flags: 0,
            status: status.into(),
            tsih: request.tsih,
            ..self.response(request, 1)
        };
        out.extend_from_slice(response.as_bytes());
        Progress::Refused(status)
    }

    fn established(&self, request: &LoginRequest) -> Established {
        Established {
            initiator: self.initiator.clone(),
            isid: request.isid,
            tsih: request.tsih.get(),
            cid: request.cid.get(),
            kind: self.kind,
            agreed: self.agreed.unwrap_or_default(),
            cmd_sn: request.cmd_sn.get(),
            stat_sn: self.stat_sn,
        }
    }

    /// One request; the stage to go to, if there is to be a transition.
    fn step(
        &mut self,
        request: &LoginRequest,
        data: &[u8],
        offer: &Offer<'_>,
        out: &mut Vec<u8>,
    ) -> Result<Option<u8>, Refused> {
        let next = self.check(request)?;
        if self.text.len() + data.len() > TEXT_MAX {
            return refuse(login_status::OUT_OF_RESOURCES);
        }
        self.text.extend_from_slice(data);
        if request.flags & flag::CONTINUE != 0 {
            return Ok(None);
        }
        let text = std::mem::take(&mut self.text);
        let pairs = pairs(&text)?;
        if self.initiator.is_empty() {
            self.identify(&pairs, request, offer, out)?;
        }
        let asks = (request.flags >> 2 & 3, next);
        if self.stage == Stage::Start {
            self.stage = if asks.0 == 0 { Stage::Security(Proof::Open) } else { Stage::Operational };
            if asks.0 == OPERATIONAL && offer.chap.is_some() {
                return refuse(login_status::AUTHENTICATION_FAILURE);
            }
        }
        if matches!(self.stage, Stage::Security(_)) {
            self.secure(&pairs, offer, out)?;
        }
        self.negotiate(&pairs, offer, out)?;
        if out.len() > TEXT_MAX {
            // Longer than what an initiator takes during a login (13.12).
            return refuse(login_status::OUT_OF_RESOURCES);
        }
        let proven = match &self.stage {
            Stage::Security(proof) => {
                *proof == Proof::Done || (*proof == Proof::Open && offer.chap.is_none())
            }
            _ => true,
        };
        let Some(next) = next.filter(|_| proven) else { return Ok(None) };
        if next == FULL_FEATURE {
            // Others may have logged in since the first request.
            self.place(request, offer)?;
        }
        self.stage = Stage::Operational;
        Ok(Some(next))
    }

    /// What must hold of a request whatever it says (11.12).
    fn check(&mut self, request: &LoginRequest) -> Result<Option<u8>, Refused> {
        self.requests += 1;
        let first = *self.first.get_or_insert(*request);
        if request.version_min > VERSION {
            return refuse(login_status::UNSUPPORTED_VERSION);
        }
        let same = (request.isid, request.tsih, request.itt, request.cid)
            == (first.isid, first.tsih, first.itt, first.cid);
        let (current, next) = (request.flags >> 2 & 3, request.flags & 3);
        let in_stage = match self.stage {
            // A first text that comes in pieces is of one stage.
            Stage::Start => current <= OPERATIONAL && current == first.flags >> 2 & 3,
            Stage::Security(_) => current == 0,
            Stage::Operational => current == OPERATIONAL,
        };
        let transit = request.flags & flag::TRANSIT != 0;
        let next_is_later = next > current && next != 2;
        let continues = request.flags & flag::CONTINUE != 0;
        if !same || !in_stage || self.requests > REQUESTS_MAX || (transit && (continues || !next_is_later)) {
            return refuse(login_status::INITIATOR_ERROR);
        }
        Ok(transit.then_some(next))
    }

    /// The keys of the first request that say who comes, and to whom (13.4 to 13.8, 13.21).
    fn identify(
        &mut self,
        pairs: &[(&str, &str)],
        request: &LoginRequest,
        offer: &Offer<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Refused> {
        let value = |key: &str| pairs.iter().find(|(k, _)| *k == key).map(|(_, value)| *value);
        let Some(initiator) = value("InitiatorName") else { return refuse(login_status::MISSING_PARAMETER) };
        let printable = initiator.bytes().all(|b| b.is_ascii_graphic());
        if initiator.is_empty() || initiator.len() > NAME_MAX || !printable {
            return refuse(login_status::INITIATOR_ERROR);
        }
        self.kind = match value("SessionType") {
            None | Some("Normal") => Kind::Normal,
            Some("Discovery") => Kind::Discovery,
            Some(_) => return refuse(login_status::SESSION_TYPE),
        };
        if self.kind == Kind::Normal {
            match value("TargetName") {
                None => return refuse(login_status::MISSING_PARAMETER),
                Some(name) if !name.eq_ignore_ascii_case(offer.target) => {
                    return refuse(login_status::NOT_FOUND);
                }
                Some(_) => push(out, "TargetPortalGroupTag", PORTAL_GROUP),
            }
        }
        initiator.clone_into(&mut self.initiator);
        let session = self.place(request, offer)?;
        // Who takes the place of its own session needs no other.
        let has_place = session.is_some() && offer.closed == login_status::OUT_OF_RESOURCES;
        if offer.closed != login_status::SUCCESS && !has_place {
            return refuse(offer.closed);
        }
        // What is the session's goes on with it (6.3.6).
        self.agreed = session.filter(|_| request.tsih.get() != 0).map(|session| session.agreed.of_session());
        Ok(())
    }

    /// The session in whose place this one comes (6.3.1). A handle is of a session that is there, which goes on with this
    /// connection instead of its own (6.3.4): there is never another one beside that. Without a handle a new session begins
    /// in the place of the one that its port has (6.3.5).
    fn place(&self, request: &LoginRequest, offer: &Offer<'_>) -> Result<Option<Existing>, Refused> {
        let asks = self.established(request);
        // What discovers has no port, and nobody takes its place.
        let session = (self.kind == Kind::Normal).then(|| (offer.session_of)(&asks.port())).flatten();
        match session.filter(|session| session.tsih == asks.tsih) {
            _ if asks.tsih == 0 => Ok(session),
            None => refuse(login_status::NO_SESSION),
            Some(session) if session.cid != asks.cid => refuse(login_status::TOO_MANY_CONNECTIONS),
            Some(session) => Ok(Some(session)),
        }
    }

    /// The security stage (12.1).
    fn secure(
        &mut self,
        pairs: &[(&str, &str)],
        offer: &Offer<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Refused> {
        let value = |key: &str| pairs.iter().find(|(k, _)| *k == key).map(|(_, value)| *value);
        let Stage::Security(proof) = &self.stage else { return Ok(()) };
        let after = match (proof, offer.chap) {
            (Proof::Open, chap) => match value("AuthMethod") {
                None => return Ok(()),
                Some(methods) => {
                    let wanted = if chap.is_some() { "CHAP" } else { "None" };
                    if !methods.split(',').any(|method| method == wanted) {
                        return refuse(login_status::AUTHENTICATION_FAILURE);
                    }
                    push(out, "AuthMethod", wanted);
                    if chap.is_some() { Proof::Method } else { Proof::Done }
                }
            },
            (Proof::Method, Some(_)) => {
                let Some(offered) = value("CHAP_A") else {
                    return refuse(login_status::AUTHENTICATION_FAILURE);
                };
                let known = |number: &str| ALGORITHMS.iter().find(|(known, _)| *known == number);
                let Some((number, algorithm)) = offered.split(',').find_map(known) else {
                    return refuse(login_status::AUTHENTICATION_FAILURE);
                };
                let [id, challenge @ ..] = &self.seed;
                push(out, "CHAP_A", number);
                push(out, "CHAP_I", &id.to_string());
                push(out, "CHAP_C", &hex(challenge));
                Proof::Challenged(*algorithm)
            }
            (Proof::Challenged(algorithm), Some(chap)) => {
                let back = self.prove(*algorithm, chap, &value)?;
                if let Some((name, response)) = back {
                    push(out, "CHAP_N", &name);
                    push(out, "CHAP_R", &hex(&response));
                }
                Proof::Done
            }
            (Proof::Done, _) => Proof::Done,
            (Proof::Method | Proof::Challenged(_), None) => {
                return refuse(login_status::AUTHENTICATION_FAILURE);
            }
        };
        self.stage = Stage::Security(after);
        Ok(())
    }

    /// Checks an initiator's response; the target's own name and response, if it is asked for them.
    fn prove<'v>(
        &self,
        algorithm: Algorithm,
        chap: &Chap,
        value: &impl Fn(&str) -> Option<&'v str>,
    ) -> Result<Option<(String, Vec<u8>)>, Refused> {
        let failed = || Refused(login_status::AUTHENTICATION_FAILURE);
        let [id, challenge @ ..] = &self.seed;
        let expected = algorithm.respond(*id, &chap.initiator.secret, challenge);
        let name = value("CHAP_N").ok_or_else(failed)?;
        let response = value("CHAP_R").and_then(|v| binary(v, BINARY_MAX)).ok_or_else(failed)?;
        let right = equal(name.as_bytes(), chap.initiator.name.as_bytes()) & equal(&response, &expected);
        if !right {
            return Err(failed());
        }
        let Some(their_id) = value("CHAP_I") else { return Ok(None) };
        let their_id = number(their_id).and_then(|id| u8::try_from(id).ok()).ok_or_else(failed)?;
        let theirs = value("CHAP_C").and_then(|v| binary(v, BINARY_MAX)).ok_or_else(failed)?;
        // An initiator that sends our own challenge back wants us to make its response (12.1.3).
        let Some(target) = chap.target.as_ref().filter(|_| theirs != challenge && !theirs.is_empty()) else {
            return Err(failed());
        };
        Ok(Some((target.name.clone(), algorithm.respond(their_id, &target.secret, &theirs))))
    }

    /// All other keys, in whatever stage they come.
    fn negotiate(
        &mut self,
        pairs: &[(&str, &str)],
        offer: &Offer<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Refused> {
        let mut agreed = self.agreed.unwrap_or_default();
        // A first burst is never longer than a burst (13.14): how long that is, is known before the other is answered.
        let is_burst = |(key, _): &&(&str, &str)| *key == "MaxBurstLength";
        let (burst, others) = (pairs.iter().filter(is_burst), pairs.iter().filter(|pair| !is_burst(pair)));
        for (key, value) in burst.chain(others) {
            match *key {
                // Of the first request alone; some say who they are in each.
                "InitiatorName" | "InitiatorAlias" | "TargetName" | "SessionType" => {}
                "AuthMethod" | "CHAP_A" | "CHAP_N" | "CHAP_R" | "CHAP_I" | "CHAP_C" => self.once(key)?,
                key if key.starts_with("CHAP_") => {}
                // Only in the full feature phase (13.3).
                "SendTargets" => return refuse(login_status::INITIATOR_ERROR),
                // The other side answers in turn; that is no offer (6.2).
                _ if matches!(*value, "NotUnderstood" | "Irrelevant" | "Reject") => {}
                _ if agreed.negotiate(key, value, offer.first_burst, out) => self.once(key)?,
                _ => push(out, key, "NotUnderstood"),
            }
        }
        self.agreed = Some(agreed);
        if self.stage == Stage::Operational && !self.declared {
            self.declared = true;
            push(out, "MaxRecvDataSegmentLength", &RECV_SEGMENT_MAX.to_string());
        }
        Ok(())
    }

    /// Nothing is negotiated twice: what the initiator relies on would be a guess (6.3).
    fn once(&mut self, key: &str) -> Result<(), Refused> {
        if self.come.iter().any(|come| come == key) {
            return refuse(login_status::INITIATOR_ERROR);
        }
        self.come.push(key.to_owned());
        Ok(())
    }

    fn response(&self, request: &LoginRequest, window: u32) -> LoginResponse {
        let exp_cmd_sn = request.cmd_sn.get();
        LoginResponse {
            opcode: opcode::LOGIN_RESPONSE,
            version_max: VERSION,
            version_active: VERSION,
            isid: request.isid,
            itt: request.itt,
            stat_sn: self.stat_sn.into(),
            exp_cmd_sn: exp_cmd_sn.into(),
            max_cmd_sn: exp_cmd_sn.wrapping_add(window).wrapping_sub(1).into(),
            ..LoginResponse::default()
        }
    }

    fn respond(
        &mut self,
        request: &LoginRequest,
        next: Option<u8>,
        text: &[u8],
        offer: &Offer<'_>,
        out: &mut Vec<u8>,
    ) {
        let current = request.flags & 0x0c;
        let tsih = match next {
            Some(FULL_FEATURE) if request.tsih.get() == 0 => offer.tsih,
            _ => request.tsih.get(),
        };
        // What has been told once cannot be taken back (4.2.2.1).
        let agreed = self.agreed.filter(|_| next == Some(FULL_FEATURE)).unwrap_or_default();
        let window = agreed.window(offer.first_burst, offer.window);
        let response = LoginResponse {
            flags: current | next.map_or(0, |next| flag::TRANSIT | next),
            data: length24(text.len()),
            tsih: tsih.into(),
            ..self.response(request, window)
        };
        out.extend_from_slice(response.as_bytes());
        out.extend_from_slice(text);
        out.resize(out.len() + padding(text.len()), 0);
        self.stat_sn = self.stat_sn.wrapping_add(1);
    }
}

/// Stages by their numbers (11.12.3).
const OPERATIONAL: u8 = 1;
const FULL_FEATURE: u8 = 3;

#[cfg(test)]
mod tests;
