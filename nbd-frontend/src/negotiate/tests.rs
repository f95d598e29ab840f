use lh_rig::hex;

use super::*;
use crate::proto::transmission_flag;

const GEOMETRY: Geometry =
    Geometry { size: 1 << 30, logical_block: 512, physical_block: 4096, max_transfer: 1 << 20, depth: 128 };

fn export() -> Export {
    Export { name: "demo".into(), description: "a volume".into(), read_only: false }
}

/// A client that writes bytes and reads what comes back, without a socket.
struct Client {
    negotiation: Negotiation,
    export: Export,
    admission: Admission,
    out: Vec<u8>,
    progress: Progress,
}

impl Client {
    fn new() -> Self {
        let mut out = Vec::new();
        let negotiation = Negotiation::new(&mut out);
        assert_eq!(hex(&out), "4e42444d4147494349484156454f50540003");
        out.clear();
        Self { negotiation, export: export(), admission: Admission::Open, out, progress: Progress::More }
    }

    /// After the greeting, with these client flags.
    fn greeted(flags: u32) -> Self {
        let mut client = Self::new();
        client.send(&flags.to_be_bytes());
        client
    }

    fn fixed() -> Self {
        Self::greeted(client_flag::FIXED_NEWSTYLE | client_flag::NO_ZEROES)
    }

    /// Gives bytes as the machine wants them, until they are used up or the handshake is over.
    fn send(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.progress == Progress::More {
            let (now, later) = bytes.split_at(bytes.len().min(self.negotiation.want()));
            let offer = Offer { export: &self.export, geometry: GEOMETRY, admission: self.admission };
            self.progress = self.negotiation.input(now, &offer, &mut self.out);
            bytes = later;
        }
    }

    /// Sends an option; what came back.
    fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send(&OPTION_MAGIC.to_be_bytes());
        self.send(&option.to_be_bytes());
        self.send(&u32::try_from(data.len()).unwrap().to_be_bytes());
        self.send(data);
        let mut replies = Vec::new();
        let mut rest = &std::mem::take(&mut self.out)[..];
        while let Some((head, after)) = rest.split_first_chunk::<20>() {
            let head = OptionReply::read_from_bytes(head).unwrap();
            assert_eq!(head.magic.get(), REPLY_MAGIC);
            assert_eq!(head.option.get(), option);
            let (data, after) = after.split_at(head.length.get() as usize);
            replies.push((head.kind.get(), data.to_vec()));
            rest = after;
        }
        assert!(rest.is_empty());
        replies
    }

    fn kinds(&mut self, option: u32, data: &[u8]) -> Vec<u32> {
        self.option(option, data).into_iter().map(|(kind, _)| kind).collect()
    }
}

fn string(text: &str) -> Vec<u8> {
    let mut bytes = u32::try_from(text.len()).unwrap().to_be_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes
}

fn info_data(name: &str, asked: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&u16::try_from(asked.len()).unwrap().to_be_bytes());
    asked.iter().for_each(|kind| data.extend_from_slice(&kind.to_be_bytes()));
    data
}

fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend_from_slice(&u32::try_from(queries.len()).unwrap().to_be_bytes());
    queries.iter().for_each(|query| data.extend_from_slice(&string(query)));
    data
}

#[test]
fn go_tells_everything_and_begins_transmission() {
    let mut client = Client::fixed();
    let asked = [info::NAME, info::DESCRIPTION, info::BLOCK_SIZE];
    let replies = client.option(option::GO, &info_data("demo", &asked));
    let infos: Vec<String> = replies.iter().map(|(kind, data)| format!("{kind}:{}", hex(data))).collect();
    assert_eq!(
        infos,
        [
            "3:000000000000400000000d6d",
            "3:000164656d6f",
            "3:00026120766f6c756d65",
            "3:0003000002000000100000100000",
            "1:"
        ]
    );
    assert_eq!(client.progress, Progress::Ready(Agreed { block_sizes: true, ..Agreed::default() }));
}

#[test]
fn the_empty_name_is_the_volume() {
    let mut client = Client::fixed();
    assert_eq!(client.kinds(option::GO, &info_data("", &[])), [reply::INFO, reply::INFO, reply::ACK]);
    assert!(matches!(client.progress, Progress::Ready(_)));
}

#[test]
fn info_does_not_begin_transmission() {
    let mut client = Client::fixed();
    assert_eq!(client.kinds(option::INFO, &info_data("demo", &[])).last(), Some(&reply::ACK));
    assert_eq!(client.progress, Progress::More);
    client.option(option::GO, &info_data("demo", &[]));
    assert!(matches!(client.progress, Progress::Ready(_)));
}

#[test]
fn a_wrong_name_is_answered_with_words() {
    let mut client = Client::fixed();
    for option in [option::INFO, option::GO] {
        let replies = client.option(option, &info_data("other", &[]));
        assert_eq!(replies.len(), 1);
        assert_eq!(replies[0].0, reply::ERR_UNKNOWN);
        let text = String::from_utf8(replies[0].1.clone()).unwrap();
        assert!(text.contains("\"other\"") && text.contains("\"demo\""), "{text}");
    }
    // A long one is not repeated in full.
    let replies = client.option(option::GO, &info_data(&"x".repeat(4096), &[]));
    assert_eq!(replies[0].0, reply::ERR_UNKNOWN);
    assert!(replies[0].1.len() < 200);
    assert_eq!(client.progress, Progress::More);
}

#[test]
fn malformed_info_is_invalid() {
    let mut good = info_data("demo", &[info::NAME]);
    good.push(0);
    let long_name = info_data(&"x".repeat(4097), &[]);
    let cases: [&[u8]; 7] = [
        b"",
        &[0, 0, 0, 4, b'd'],
        &[0xff, 0xff, 0xff, 0xff, 0, 0],
        &good,
        &info_data("de\0mo", &[]),
        &[0, 0, 0, 1, 0xff, 0, 0],
        &long_name,
    ];
    for data in cases {
        let mut client = Client::fixed();
        assert_eq!(client.kinds(option::GO, data), [reply::ERR_INVALID], "{}", hex(data));
        assert_eq!(client.progress, Progress::More);
    }
}

#[test]
fn export_name_with_and_without_zeroes() {
    let mut client = Client::fixed();
    client.send(&[&OPTION_MAGIC.to_be_bytes()[..], &[0, 0, 0, 1, 0, 0, 0, 4], b"demo"].concat());
    assert_eq!(hex(&client.out), "00000000400000000d6d");
    assert!(matches!(client.progress, Progress::Ready(_)));

    let mut old = Client::greeted(0);
    old.send(&[&OPTION_MAGIC.to_be_bytes()[..], &[0, 0, 0, 1, 0, 0, 0, 0]].concat());
    assert_eq!(old.out.len(), 10 + 124);
    assert!(old.out[10..].iter().all(|b| *b == 0));
    assert!(matches!(old.progress, Progress::Ready(_)));
}

#[test]
fn export_name_cannot_be_refused_politely() {
    let mut client = Client::fixed();
    client.option(option::EXPORT_NAME, b"other");
    assert_eq!(client.progress, Progress::Close(Reason::UnknownExport));

    let mut client = Client::fixed();
    client.option(option::EXPORT_NAME, &vec![b'x'; OPTION_DATA_MAX + 1]);
    assert_eq!(client.progress, Progress::Close(Reason::UnknownExport));

    let mut client = Client::fixed();
    client.option(option::EXTENDED_HEADERS, b"");
    client.option(option::EXPORT_NAME, b"demo");
    assert_eq!(client.progress, Progress::Close(Reason::ExportNameAfterExtended));

    let mut client = Client::fixed();
    client.admission = Admission::Stopping;
    client.option(option::EXPORT_NAME, b"demo");
    assert_eq!(client.progress, Progress::Close(Reason::NotAdmitted(Admission::Stopping)));
}

#[test]
fn list_names_the_export() {
    let mut client = Client::fixed();
    let replies = client.option(option::LIST, b"");
    assert_eq!(replies[0], (reply::SERVER, b"\0\0\0\x04demoa volume".to_vec()));
    assert_eq!(replies[1], (reply::ACK, vec![]));
    assert_eq!(client.kinds(option::LIST, b"x"), [reply::ERR_INVALID]);
}

#[test]
fn abort_is_acknowledged_even_with_data() {
    for data in [&b""[..], b"bye", &[0; OPTION_DATA_MAX + 1]] {
        let mut client = Client::fixed();
        assert_eq!(client.kinds(option::ABORT, data), [reply::ACK]);
        assert_eq!(client.progress, Progress::Close(Reason::Aborted));
    }
}

#[test]
fn tls_is_refused_politely_and_unknown_options_too() {
    let mut client = Client::fixed();
    let replies = client.option(option::STARTTLS, b"");
    assert_eq!(replies[0].0, reply::ERR_UNSUP);
    assert!(String::from_utf8_lossy(&replies[0].1).contains("TLS"));
    assert_eq!(client.kinds(option::STARTTLS, b"x"), [reply::ERR_INVALID]);
    // NBD_OPT_PEEK_EXPORT was withdrawn.
    for unknown in [0, 4, 12, u32::MAX] {
        assert_eq!(client.kinds(unknown, b"whatever"), [reply::ERR_UNSUP]);
    }
    assert_eq!(client.progress, Progress::More);
}

#[test]
fn framing_is_agreed_on() {
    let mut client = Client::fixed();
    assert_eq!(client.kinds(option::STRUCTURED_REPLY, b"x"), [reply::ERR_INVALID]);
    assert_eq!(client.kinds(option::STRUCTURED_REPLY, b""), [reply::ACK]);
    let replies = client.option(option::GO, &info_data("demo", &[]));
    let flags = u16::from_be_bytes([replies[0].1[10], replies[0].1[11]]);
    assert_ne!(flags & transmission_flag::SEND_DF, 0);
    assert_eq!(flags & transmission_flag::BLOCK_STATUS_PAYLOAD, 0);
    let structured = Agreed { framing: Framing::Structured, ..Agreed::default() };
    assert_eq!(client.progress, Progress::Ready(structured));

    let mut client = Client::fixed();
    client.option(option::STRUCTURED_REPLY, b"");
    assert_eq!(client.kinds(option::EXTENDED_HEADERS, b"x"), [reply::ERR_INVALID]);
    assert_eq!(client.kinds(option::EXTENDED_HEADERS, b""), [reply::ACK]);
    assert_eq!(client.kinds(option::STRUCTURED_REPLY, b""), [reply::ERR_EXT_HEADER_REQD]);
    client.option(option::SET_META_CONTEXT, &context_data("demo", &["base:allocation"]));
    let replies = client.option(option::GO, &info_data("demo", &[]));
    let flags = u16::from_be_bytes([replies[0].1[10], replies[0].1[11]]);
    assert_ne!(flags & transmission_flag::BLOCK_STATUS_PAYLOAD, 0);
    let extended = Agreed { framing: Framing::Extended, allocation: true, block_sizes: false };
    assert_eq!(client.progress, Progress::Ready(extended));
}

/// Whether it asks when it goes, or has asked before.
#[test]
fn who_has_asked_for_the_block_sizes_is_held_to_them() {
    let asks = info_data("demo", &[info::BLOCK_SIZE]);
    let silent = info_data("demo", &[info::NAME]);
    for (first, last, is_held) in [(&silent, &silent, false), (&silent, &asks, true), (&asks, &silent, true)]
    {
        let mut client = Client::fixed();
        client.option(option::INFO, first);
        client.option(option::GO, last);
        let agreed = Agreed { block_sizes: is_held, ..Agreed::default() };
        assert_eq!(client.progress, Progress::Ready(agreed));
    }
    let mut client = Client::fixed();
    // It was not told of this export.
    client.option(option::INFO, &info_data("another", &[info::BLOCK_SIZE]));
    client.option(option::GO, &silent);
    assert_eq!(client.progress, Progress::Ready(Agreed::default()));
}

#[test]
fn a_read_only_export_says_so() {
    let mut client = Client::fixed();
    client.export.read_only = true;
    let replies = client.option(option::INFO, &info_data("demo", &[]));
    assert_ne!(replies[0].1[11] & 2, 0);
}

#[test]
fn contexts_need_structured_replies() {
    let mut client = Client::fixed();
    let data = context_data("demo", &["base:allocation"]);
    assert_eq!(client.kinds(option::LIST_META_CONTEXT, &data), [reply::ERR_INVALID]);
    assert_eq!(client.kinds(option::SET_META_CONTEXT, &data), [reply::ERR_INVALID]);
}

#[test]
fn contexts_are_listed_and_selected() {
    let mut client = Client::fixed();
    client.option(option::STRUCTURED_REPLY, b"");
    let listed = (reply::META_CONTEXT, b"\0\0\0\0base:allocation".to_vec());
    let selected = (reply::META_CONTEXT, b"\0\0\0\x01base:allocation".to_vec());
    let ack = (reply::ACK, vec![]);
    let list = |client: &mut Client, queries: &[&str]| {
        client.option(option::LIST_META_CONTEXT, &context_data("demo", queries))
    };
    assert_eq!(list(&mut client, &[]), [listed.clone(), ack.clone()]);
    assert_eq!(list(&mut client, &["base:"]), [listed.clone(), ack.clone()]);
    assert_eq!(list(&mut client, &["qemu:x", "base:allocation", "base:"]), [listed, ack.clone()]);
    assert_eq!(
        list(&mut client, &["base:other", "qemu:", "nonsense"]).as_slice(),
        std::slice::from_ref(&ack)
    );
    assert!(!client.negotiation.agreed.allocation);

    let set = |client: &mut Client, queries: &[&str]| {
        client.option(option::SET_META_CONTEXT, &context_data("", queries))
    };
    assert_eq!(set(&mut client, &["base:allocation", "base:allocation"]), [selected, ack.clone()]);
    assert!(client.negotiation.agreed.allocation);
    // A wildcard selects nothing, and every new selection replaces the old one, a failed one too.
    assert_eq!(set(&mut client, &["base:"]), [ack]);
    assert!(!client.negotiation.agreed.allocation);
    set(&mut client, &["base:allocation"]);
    let wrong = context_data("other", &["base:allocation"]);
    assert_eq!(client.kinds(option::SET_META_CONTEXT, &wrong), [reply::ERR_UNKNOWN]);
    assert!(!client.negotiation.agreed.allocation);
    set(&mut client, &["base:allocation"]);
    assert_eq!(client.kinds(option::SET_META_CONTEXT, b"\0\0"), [reply::ERR_INVALID]);
    assert!(!client.negotiation.agreed.allocation);
    set(&mut client, &["base:allocation"]);
    set(&mut client, &[]);
    assert!(!client.negotiation.agreed.allocation);
}

#[test]
fn malformed_queries_are_invalid() {
    let mut client = Client::fixed();
    client.option(option::STRUCTURED_REPLY, b"");
    let mut few = context_data("demo", &["base:"]);
    few[8..12].copy_from_slice(&2_u32.to_be_bytes());
    let mut many = context_data("demo", &["base:"]);
    many[8..12].copy_from_slice(&0_u32.to_be_bytes());
    let mut endless = context_data("demo", &[]);
    endless[8..12].copy_from_slice(&u32::MAX.to_be_bytes());
    for data in [&few, &many, &endless, &vec![], &vec![0xff; 64]] {
        assert_eq!(client.kinds(option::LIST_META_CONTEXT, data), [reply::ERR_INVALID], "{}", hex(data));
    }
}

#[test]
fn oversize_data_is_dropped_in_bounded_memory() {
    let mut client = Client::fixed();
    client.option(option::STRUCTURED_REPLY, b"");
    client.option(option::SET_META_CONTEXT, &context_data("", &["base:allocation"]));
    let data = vec![7; 10 << 20];
    for option in [option::GO, option::LIST, option::SET_META_CONTEXT, 99] {
        assert_eq!(client.kinds(option, &data), [reply::ERR_TOO_BIG]);
        assert!(client.negotiation.buffer.capacity() <= OPTION_DATA_MAX);
    }
    assert!(!client.negotiation.agreed.allocation);
    assert_eq!(client.kinds(option::GO, &info_data("demo", &[])).last(), Some(&reply::ACK));
}

#[test]
fn who_speaks_something_else_is_disconnected() {
    // An oldstyle client begins with a request.
    let mut client = Client::new();
    client.send(&crate::proto::REQUEST_MAGIC.to_be_bytes());
    assert_eq!(client.progress, Progress::Close(Reason::ClientFlags(0x2560_9513)));

    let mut client = Client::new();
    client.send(b"GET / HTTP/1.1\r\n");
    assert_eq!(client.progress, Progress::Close(Reason::ClientFlags(0x4745_5420)));

    let mut client = Client::fixed();
    client.send(&[0x55; 16]);
    assert_eq!(client.progress, Progress::Close(Reason::Magic(0x5555_5555_5555_5555)));

    let mut client = Client::greeted(0);
    client.option(option::LIST, b"");
    assert_eq!(client.progress, Progress::Close(Reason::NotFixed(option::LIST)));
}

#[test]
fn a_server_that_stops_says_so() {
    let mut client = Client::fixed();
    client.admission = Admission::Stopping;
    for option in [option::LIST, option::GO, option::STRUCTURED_REPLY, option::SET_META_CONTEXT, 77] {
        assert_eq!(client.kinds(option, &info_data("demo", &[])), [reply::ERR_SHUTDOWN]);
    }
    assert_eq!(client.kinds(option::ABORT, b""), [reply::ACK]);
}

#[test]
fn a_full_server_says_so() {
    let mut client = Client::fixed();
    client.admission = Admission::Full;
    let replies = client.option(option::GO, &info_data("demo", &[]));
    assert_eq!(replies[0].0, reply::ERR_POLICY);
    assert!(String::from_utf8_lossy(&replies[0].1).contains("too many"));
    assert_eq!(client.kinds(option::INFO, &info_data("demo", &[])).last(), Some(&reply::ACK));
    client.option(option::EXPORT_NAME, b"demo");
    assert_eq!(client.progress, Progress::Close(Reason::NotAdmitted(Admission::Full)));
}

#[test]
fn byte_by_byte_is_the_same() {
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    for (option, data) in [
        (option::STRUCTURED_REPLY, vec![]),
        (option::SET_META_CONTEXT, context_data("demo", &["base:allocation"])),
        (option::GO, info_data("demo", &[info::NAME])),
    ] {
        bytes.extend_from_slice(&OPTION_MAGIC.to_be_bytes());
        bytes.extend_from_slice(&option.to_be_bytes());
        bytes.extend_from_slice(&u32::try_from(data.len()).unwrap().to_be_bytes());
        bytes.extend_from_slice(&data);
    }
    let mut whole = Client::new();
    whole.send(&bytes);
    let mut slow = Client::new();
    bytes.chunks(1).for_each(|byte| slow.send(byte));
    let structured = Agreed { framing: Framing::Structured, allocation: true, block_sizes: false };
    assert_eq!(whole.progress, Progress::Ready(structured));
    assert_eq!((slow.progress, slow.out), (whole.progress, whole.out));
}
