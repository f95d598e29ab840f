//! The handshake: fixed newstyle negotiation as a pure machine, bytes in, bytes and a decision out.
//!
//! It asks for exactly the bytes that it needs next ([`Negotiation::want`]), so that nothing of the transmission phase
//! is read by mistake. It keeps at most [`OPTION_DATA_MAX`] bytes of a client; what is longer is read, dropped and
//! answered with `NBD_REP_ERR_TOO_BIG`. A client that leaves the protocol is disconnected, with the reason in
//! [`Progress::Close`].
//!
//! ```text
//!            client flags            option header            data
//!   Greeted ---------------> Option ---------------> Data ----------+--> Ready (GO, EXPORT_NAME)
//!                              ^  \                                 +--> Close (ABORT, misuse)
//!                              |   `--too long--> Dropping --.      |
//!                              +------------------------------+-----+
//! ```

use lh_block::Geometry;
use zerocopy::{FromBytes, IntoBytes};

use crate::export::{Agreed, Export, Framing, block_sizes};
use crate::proto::{
    BASE_ALLOCATION, BASE_ALLOCATION_ID, EXPORT_NAME_ZEROES, ExportReply, Greeting, InfoBlockSize,
    InfoExport, MAGIC, OPTION_MAGIC, OptionHeader, OptionReply, REPLY_MAGIC, STRING_MAX, client_flag,
    handshake_flag, info, option, reply,
};

/// Longest data of an option that is looked at: one name of [`STRING_MAX`] and room for queries. A thousand
/// connections that all send this much cost 8 MiB.
pub const OPTION_DATA_MAX: usize = 2 * STRING_MAX;

/// Dropped bytes are asked for in pieces of this.
const DROP_PIECE: usize = 4096;

/// What became of the bytes given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Send what there is to send, and give more bytes.
    More,
    /// Send what there is to send; the transmission phase begins.
    Ready(Agreed),
    /// Send what there is to send and close.
    Close(Reason),
}

/// Why a handshake ends without transmission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// `NBD_OPT_ABORT`: the client has what it wanted.
    #[error("client ended the handshake")]
    Aborted,
    /// Flags that nobody defined: an oldstyle client, or none at all.
    #[error("no NBD newstyle client (client flags {0:#010x})")]
    ClientFlags(u32),
    /// Bytes that are no option.
    #[error("no NBD option (magic {0:#018x})")]
    Magic(u64),
    /// Anything but `NBD_OPT_EXPORT_NAME` from a client that does not understand replies to options.
    #[error("option {0} from a client without fixed newstyle")]
    NotFixed(u32),
    /// `NBD_OPT_EXPORT_NAME` for something else; its reply knows no errors.
    #[error("unknown export asked for")]
    UnknownExport,
    /// `NBD_OPT_EXPORT_NAME` after extended headers were agreed on.
    #[error("NBD_OPT_EXPORT_NAME after extended headers")]
    ExportNameAfterExtended,
    /// `NBD_OPT_EXPORT_NAME` while no new session is begun.
    #[error("no new session is begun ({0:?})")]
    NotAdmitted(Admission),
}

#[derive(Debug)]
enum State {
    /// Greeting sent; the client's flags are next.
    Greeted,
    /// An option's header is next.
    Option,
    /// The data of an option is next, `length` bytes.
    Data { option: u32, length: usize },
    /// `left` bytes of an option's data are still to be dropped.
    Dropping { option: u32, left: u64 },
}

/// The handshake with one client.
#[derive(Debug)]
pub struct Negotiation {
    state: State,
    /// Bytes of the current item. Never more than [`OPTION_DATA_MAX`].
    buffer: Vec<u8>,
    fixed: bool,
    no_zeroes: bool,
    agreed: Agreed,
}

/// The volume as the handshake sees it.
#[derive(Clone, Copy, Debug)]
pub struct Offer<'a> {
    /// Name and description.
    pub export: &'a Export,
    /// Sizes at this moment.
    pub geometry: Geometry,
    /// Whether a session may begin.
    pub admission: Admission,
}

/// Whether sessions may begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Yes.
    Open,
    /// As many as there may be are there.
    Full,
    /// The server is being stopped.
    Stopping,
}

impl Negotiation {
    /// A new handshake; its greeting is appended to `out`.
    pub fn new(out: &mut Vec<u8>) -> Self {
        let flags = handshake_flag::FIXED_NEWSTYLE | handshake_flag::NO_ZEROES;
        let greeting =
            Greeting { magic: MAGIC.into(), option_magic: OPTION_MAGIC.into(), flags: flags.into() };
        out.extend_from_slice(greeting.as_bytes());
        Self {
            state: State::Greeted,
            buffer: Vec::new(),
            fixed: false,
            no_zeroes: false,
            agreed: Agreed::default(),
        }
    }

    /// How many bytes at most to give next; never 0.
    pub fn want(&self) -> usize {
        match self.state {
            State::Greeted => size_of::<u32>() - self.buffer.len(),
            State::Option => size_of::<OptionHeader>() - self.buffer.len(),
            State::Data { length, .. } => length - self.buffer.len(),
            State::Dropping { left, .. } => usize::try_from(left).map_or(DROP_PIECE, |n| n.min(DROP_PIECE)),
        }
    }

    /// Takes bytes of the client. Answers are appended to `out`: less than 8 KiB per call.
    ///
    /// # Panics
    /// If more than [`Self::want`] bytes are given.
    pub fn input(&mut self, bytes: &[u8], offer: &Offer<'_>, out: &mut Vec<u8>) -> Progress {
        assert!(bytes.len() <= self.want(), "more bytes than wanted");
        if let State::Dropping { option, left } = &mut self.state {
            *left -= bytes.len() as u64;
            if *left == 0 {
                let option = *option;
                self.state = State::Option;
                return self.refuse_oversize(option, out);
            }
            return Progress::More;
        }
        self.buffer.extend_from_slice(bytes);
        if self.want() > 0 {
            return Progress::More;
        }
        let item = std::mem::take(&mut self.buffer);
        match self.state {
            State::Greeted => self.client_flags(&item),
            State::Option => self.option_header(&item, offer, out),
            State::Data { option, .. } => {
                self.state = State::Option;
                self.option(option, &item, offer, out)
            }
            State::Dropping { .. } => Progress::More,
        }
    }

    fn client_flags(&mut self, item: &[u8]) -> Progress {
        let flags = read_u32(item, 0).unwrap_or(u32::MAX);
        if flags & !client_flag::ALL != 0 {
            return Progress::Close(Reason::ClientFlags(flags));
        }
        self.fixed = flags & client_flag::FIXED_NEWSTYLE != 0;
        self.no_zeroes = flags & client_flag::NO_ZEROES != 0;
        self.state = State::Option;
        Progress::More
    }

    fn option_header(&mut self, item: &[u8], offer: &Offer<'_>, out: &mut Vec<u8>) -> Progress {
        let Ok(header) = OptionHeader::read_from_bytes(item) else {
            return Progress::Close(Reason::Magic(0));
        };
        if header.magic.get() != OPTION_MAGIC {
            return Progress::Close(Reason::Magic(header.magic.get()));
        }
        let (option, length) = (header.option.get(), header.length.get());
        if !self.fixed && option != option::EXPORT_NAME {
            return Progress::Close(Reason::NotFixed(option));
        }
        match usize::try_from(length) {
            Ok(0) => self.option(option, &[], offer, out),
            Ok(length) if length <= OPTION_DATA_MAX => {
                self.state = State::Data { option, length };
                Progress::More
            }
            _ => {
                self.state = State::Dropping { option, left: u64::from(length) };
                Progress::More
            }
        }
    }

    /// The answer to an option whose data was too long to look at.
    fn refuse_oversize(&mut self, option: u32, out: &mut Vec<u8>) -> Progress {
        match option {
            option::EXPORT_NAME => return Progress::Close(Reason::UnknownExport),
            option::ABORT => return abort(out),
            option::SET_META_CONTEXT => self.agreed.allocation = false,
            _ => {}
        }
        push_error(out, option, reply::ERR_TOO_BIG, "more option data than this server reads (8 KiB)");
        Progress::More
    }

    fn option(&mut self, option: u32, data: &[u8], offer: &Offer<'_>, out: &mut Vec<u8>) -> Progress {
        match option {
            option::ABORT => return abort(out),
            option::EXPORT_NAME => return self.export_name(data, offer, out),
            _ if offer.admission == Admission::Stopping => {
                push_error(out, option, reply::ERR_SHUTDOWN, "the volume is being stopped");
            }
            option::GO if offer.admission == Admission::Full => {
                push_error(out, option, reply::ERR_POLICY, "too many connections to this volume");
            }
            option::GO | option::INFO => return self.info(option, data, offer, out),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(option, data, offer, out);
            }
            option::LIST | option::STARTTLS | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS
                if !data.is_empty() =>
            {
                push_error(out, option, reply::ERR_INVALID, "this option takes no data");
            }
            option::LIST => list(offer.export, out),
            option::STARTTLS => push_error(out, option, reply::ERR_UNSUP, "TLS is not available here"),
            option::STRUCTURED_REPLY => self.structured_reply(out),
            option::EXTENDED_HEADERS => {
                self.agreed.framing = Framing::Extended;
                push_reply(out, option, reply::ACK, &[]);
            }
            _ => push_error(out, option, reply::ERR_UNSUP, "unknown option"),
        }
        Progress::More
    }

    fn structured_reply(&mut self, out: &mut Vec<u8>) {
        if self.agreed.framing == Framing::Extended {
            let text = "extended headers are already on";
            push_error(out, option::STRUCTURED_REPLY, reply::ERR_EXT_HEADER_REQD, text);
        } else {
            self.agreed.framing = Framing::Structured;
            push_reply(out, option::STRUCTURED_REPLY, reply::ACK, &[]);
        }
    }

    fn export_name(&self, data: &[u8], offer: &Offer<'_>, out: &mut Vec<u8>) -> Progress {
        if offer.admission != Admission::Open {
            return Progress::Close(Reason::NotAdmitted(offer.admission));
        }
        if self.agreed.framing == Framing::Extended {
            return Progress::Close(Reason::ExportNameAfterExtended);
        }
        if !std::str::from_utf8(data).is_ok_and(|name| offer.export.answers_to(name)) {
            return Progress::Close(Reason::UnknownExport);
        }
        let flags = self.agreed.transmission_flags(offer.export);
        let answer = ExportReply { size: offer.geometry.size.into(), flags: flags.into() };
        out.extend_from_slice(answer.as_bytes());
        if !self.no_zeroes {
            out.extend_from_slice(&[0; EXPORT_NAME_ZEROES]);
        }
        Progress::Ready(self.agreed)
    }

    fn info(&mut self, option: u32, data: &[u8], offer: &Offer<'_>, out: &mut Vec<u8>) -> Progress {
        let Some((name, asked)) = parse_info(data) else {
            push_error(out, option, reply::ERR_INVALID, "malformed NBD_OPT_INFO or NBD_OPT_GO");
            return Progress::More;
        };
        if !offer.export.answers_to(name) {
            push_unknown(out, option, name, offer.export);
            return Progress::More;
        }
        self.agreed.block_sizes |= asks_for(asked, info::BLOCK_SIZE);
        push_info(out, option, asked, self.agreed, offer);
        push_reply(out, option, reply::ACK, &[]);
        if option == option::GO { Progress::Ready(self.agreed) } else { Progress::More }
    }

    fn meta_context(&mut self, option: u32, data: &[u8], offer: &Offer<'_>, out: &mut Vec<u8>) {
        let set = option == option::SET_META_CONTEXT;
        if set {
            // Even a failing one replaces what was selected before.
            self.agreed.allocation = false;
        }
        if self.agreed.framing == Framing::Simple {
            let text = "structured replies or extended headers are needed first";
            return push_error(out, option, reply::ERR_INVALID, text);
        }
        let Some((name, matched)) = parse_meta_context(data, set) else {
            return push_error(out, option, reply::ERR_INVALID, "malformed metadata context query");
        };
        if !offer.export.answers_to(name) {
            return push_unknown(out, option, name, offer.export);
        }
        if matched {
            // The id of a listed context is reserved; only a selected one has one.
            let id = if set { BASE_ALLOCATION_ID } else { 0 };
            push_reply(out, option, reply::META_CONTEXT, &[&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()]);
        }
        self.agreed.allocation |= set && matched;
        push_reply(out, option, reply::ACK, &[]);
    }
}

fn abort(out: &mut Vec<u8>) -> Progress {
    push_reply(out, option::ABORT, reply::ACK, &[]);
    Progress::Close(Reason::Aborted)
}

fn list(export: &Export, out: &mut Vec<u8>) {
    let length = wire_len(export.name.len()).to_be_bytes();
    let parts = [&length, export.name.as_bytes(), export.description.as_bytes()];
    push_reply(out, option::LIST, reply::SERVER, &parts);
    push_reply(out, option::LIST, reply::ACK, &[]);
}

fn asks_for(asked: &[u8], kind: u16) -> bool {
    asked.as_chunks::<2>().0.contains(&kind.to_be_bytes())
}

/// All that there is to say of the export. The block sizes are always told, asked for or not.
fn push_info(out: &mut Vec<u8>, option: u32, asked: &[u8], agreed: Agreed, offer: &Offer<'_>) {
    let flags = agreed.transmission_flags(offer.export);
    let export =
        InfoExport { kind: info::EXPORT.into(), size: offer.geometry.size.into(), flags: flags.into() };
    push_reply(out, option, reply::INFO, &[export.as_bytes()]);
    if asks_for(asked, info::NAME) {
        let parts = [&info::NAME.to_be_bytes(), offer.export.name.as_bytes()];
        push_reply(out, option, reply::INFO, &parts);
    }
    if asks_for(asked, info::DESCRIPTION) && !offer.export.description.is_empty() {
        let parts = [&info::DESCRIPTION.to_be_bytes(), offer.export.description.as_bytes()];
        push_reply(out, option, reply::INFO, &parts);
    }
    let (minimum, preferred, maximum) = block_sizes(&offer.geometry);
    let block = InfoBlockSize {
        kind: info::BLOCK_SIZE.into(),
        minimum: minimum.into(),
        preferred: preferred.into(),
        maximum: maximum.into(),
    };
    push_reply(out, option, reply::INFO, &[block.as_bytes()]);
}

/// Name and list of information requests of `NBD_OPT_INFO` and `NBD_OPT_GO`.
fn parse_info(data: &[u8]) -> Option<(&str, &[u8])> {
    let (name, rest) = read_string(data)?;
    let (count, rest) = rest.split_first_chunk::<2>()?;
    (rest.len() == 2 * usize::from(u16::from_be_bytes(*count))).then_some((name, rest))
}

/// Export name of a metadata context option, and whether its queries mean `base:allocation`. Queries of other
/// namespaces are ignored, as the protocol demands.
fn parse_meta_context(data: &[u8], set: bool) -> Option<(&str, bool)> {
    let (name, rest) = read_string(data)?;
    let (count, mut rest) = rest.split_first_chunk::<4>()?;
    let count = u32::from_be_bytes(*count);
    // No query lists everything and selects nothing.
    let mut matched = count == 0 && !set;
    for _ in 0..count {
        let (query, after) = read_string(rest)?;
        matched |= query == BASE_ALLOCATION || (!set && query == "base:");
        rest = after;
    }
    rest.is_empty().then_some((name, matched))
}

/// A string with 32 bits of length before it, and what follows.
fn read_string(data: &[u8]) -> Option<(&str, &[u8])> {
    let (length, rest) = data.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_be_bytes(*length)).ok()?;
    if length > STRING_MAX {
        return None;
    }
    let (text, rest) = rest.split_at_checked(length)?;
    let text = std::str::from_utf8(text).ok()?;
    (!text.contains('\0')).then_some((text, rest))
}

fn read_u32(data: &[u8], at: usize) -> Option<u32> {
    data.get(at..)?.first_chunk::<4>().map(|b| u32::from_be_bytes(*b))
}

fn push_unknown(out: &mut Vec<u8>, option: u32, name: &str, export: &Export) {
    // A name of 4096 bytes would make the text longer than a string may be.
    let shown: String = name.chars().take(64).collect();
    let text = format!("no export {shown:?} here: this one is {:?}", export.name);
    push_error(out, option, reply::ERR_UNKNOWN, &text);
}

fn push_error(out: &mut Vec<u8>, option: u32, kind: u32, text: &str) {
    push_reply(out, option, kind, &[text.as_bytes()]);
}

fn push_reply(out: &mut Vec<u8>, option: u32, kind: u32, parts: &[&[u8]]) {
    let length = wire_len(parts.iter().map(|p| p.len()).sum());
    let head = OptionReply {
        magic: REPLY_MAGIC.into(),
        option: option.into(),
        kind: kind.into(),
        length: length.into(),
    };
    out.extend_from_slice(head.as_bytes());
    for part in parts {
        out.extend_from_slice(part);
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "names, descriptions and texts of this process: far below"
)]
fn wire_len(len: usize) -> u32 {
    len as u32
}

#[cfg(test)]
mod tests;
