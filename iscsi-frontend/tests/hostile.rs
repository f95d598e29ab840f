//! Initiators that send what they must not: their connection ends with the right word, nobody else feels anything, and
//! memory stays bounded.

mod support;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use iscsi_frontend::Limits;
use iscsi_frontend::pdu::{DataOut, FINAL, HEADER, NO_TAG, flag, opcode};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, SockaddrIn, connect, setsockopt, socket, sockopt};
use support::client::{Client, PLAIN, login_request, rw10};
use support::pace::in_time;
use support::{PATIENCE, Running, Setup};
use zerocopy::IntoBytes;

/// A session that was there before, and has to be all right afterwards.
struct Witness(Client);

impl Witness {
    fn new(server: &Running) -> Self {
        let mut client = Client::login(server, 99, PLAIN);
        client.ready();
        assert_eq!(client.write(64, &[0x77; 4096], 4096).status, 0);
        Self(client)
    }

    fn is_well(&mut self, server: &Running) {
        assert_eq!(self.0.read(64, 8).data, [0x77; 4096]);
        server.until("the others have gone", |load| load.connections == 1 && load.commands == 0);
        assert_eq!(server.load().payload_bytes, 0);
    }
}

/// A header of this operation, flags, AHS words and data length.
fn header(code: u8, flags: u8, ahs: u8, len: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    (header[0], header[1], header[4]) = (code, flags, ahs);
    header[5..8].copy_from_slice(&len.to_be_bytes()[1..]);
    header[19] = 200;
    header
}

#[test]
fn pdus_that_cannot_be_end_the_connection() {
    let server = Running::start();
    let mut witness = Witness::new(&server);
    let cases: [(&str, [u8; HEADER]); 9] = [
        ("a login behind the login", header(0x43, 0x87, 0, 0)),
        ("the target's own operation", header(0x25, 0x80, 0, 0)),
        ("a reject", header(0x3f, 0x80, 0, 0)),
        ("a data segment longer than declared", header(0x01, 0xa0, 0, 262_145)),
        ("the longest data segment", header(0x05, 0x80, 0, 0xff_ffff)),
        ("additional headers of a ping", header(0x40, 0x80, 1, 0)),
        ("additional headers of data", header(0x05, 0x80, 255, 0)),
        ("everything set", [0xff; HEADER]),
        ("a gap", {
            let mut gap = header(0x01, 0x80, 0, 0);
            gap[24..28].copy_from_slice(&20_u32.to_be_bytes());
            gap
        }),
    ];
    for (what, bytes) in cases {
        let mut client = Client::login(&server, 1, PLAIN);
        client.stream.write_all(&bytes).unwrap();
        assert!(client.is_closed(), "{what}");
    }
    witness.is_well(&server);
}

#[test]
fn data_that_was_not_asked_for() {
    let server = Running::start();
    let mut witness = Witness::new(&server);
    // Immediate data beyond the first burst, or beyond what is expected, or where there is to be none.
    let cases =
        [(PLAIN, 65536, 16385), ("", 131_072, 65537), (PLAIN, 512, 1024), ("ImmediateData=No\0", 512, 512)];
    for (keys, expected, len) in cases {
        let mut client = Client::login(&server, 1, keys);
        let command = client.command(&rw10(0x2a, 0, 1), FINAL | flag::WRITE, expected, len);
        client.send(command.as_bytes(), &vec![0xee; len]).unwrap();
        assert!(client.is_closed(), "{keys} {expected} {len}");
    }
    // More to come where everything is asked for.
    let mut client = Client::login(&server, 1, PLAIN);
    let command = client.command(&rw10(0x2a, 0, 1), flag::WRITE, 512, 0);
    client.send(command.as_bytes(), b"").unwrap();
    assert!(client.is_closed());
    // Data of no command, or of another's, is dropped.
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    for ttt in [NO_TAG, 0, 0x1_0000, 0x7fff_ffff] {
        client.data_out(4711, ttt, 0, &[0xee; 512], 512);
    }
    assert_eq!(client.read(0, 1).data, [0; 512]);
    drop(client);
    witness.is_well(&server);
}

#[test]
fn solicited_data_out_of_place_fails_the_command() {
    let server = Running::start();
    let mut witness = Witness::new(&server);
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    // Offset, number, length and end of a Data-Out for 1,024 bytes that were asked for.
    for (offset, data_sn, len, last) in [
        (512, 0, 512, true),
        (0, 1, 1024, true),
        (0, 0, 1536, true),
        (0, 0, 1536, false),
        (0, 0, 512, true),
        (0, 0, 1024, false),
    ] {
        let tag = client.start(&rw10(0x2a, 0, 2), FINAL | flag::WRITE, 1024);
        let r2t = client.recv().unwrap();
        assert_eq!(r2t.code(), opcode::R2T);
        let [_, length @ ..] = u32::to_be_bytes(len);
        let data = DataOut {
            opcode: opcode::DATA_OUT,
            flags: if last { FINAL } else { 0 },
            data: length,
            itt: tag.into(),
            ttt: r2t.u32_at(20).into(),
            data_sn: u32::into(data_sn),
            offset: u32::into(offset),
            ..DataOut::default()
        };
        client.send(data.as_bytes(), &vec![0xee; len as usize]).unwrap();
        assert_eq!(client.answer(b"").sense, Some((0xb, 0x0c0d)), "{offset} {data_sn} {len} {last}");
    }
    assert_eq!(client.read(0, 2).data, [0; 1024]);
    drop(client);
    witness.is_well(&server);
}

/// RFC 7143, 11.4.7.2, tells too much of what nobody has asked for from what is out of place.
#[test]
fn more_unsolicited_data_than_was_agreed_on_fails_the_command() {
    let server = Running::start();
    let mut witness = Witness::new(&server);
    let mut client = Client::login(&server, 1, "InitialR2T=No\0FirstBurstLength=1024\0");
    client.ready();
    for (expected, lengths, code) in [
        // Beyond the first burst, at once and behind some of it; beyond what the command has; and a gap.
        (4096, &[(0, 1536)][..], 0x0c0c),
        (4096, &[(0, 512), (512, 1024)], 0x0c0c),
        (512, &[(0, 1024)], 0x0c0c),
        (4096, &[(0, 256), (512, 256)], 0x0c0d),
    ] {
        let tag = client.start(&rw10(0x2a, 0, 8), flag::WRITE, expected);
        for (data_sn, (offset, len)) in (0_u32..).zip(lengths) {
            let [_, length @ ..] = u32::to_be_bytes(*len);
            let data = DataOut {
                opcode: opcode::DATA_OUT,
                data: length,
                itt: tag.into(),
                ttt: NO_TAG.into(),
                data_sn: data_sn.into(),
                offset: u32::into(*offset),
                ..DataOut::default()
            };
            client.send(data.as_bytes(), &vec![0xee; *len as usize]).unwrap();
        }
        assert_eq!(client.answer(b"").sense, Some((0xb, code)), "{expected} {lengths:?}");
    }
    assert_eq!(client.read(0, 8).data, [0; 4096]);
    drop(client);
    witness.is_well(&server);
}

#[test]
fn wrong_digests_end_the_connection() {
    let server = Running::start();
    let mut witness = Witness::new(&server);
    let keys = "HeaderDigest=CRC32C\0DataDigest=CRC32C\0";
    let mut client = Client::login(&server, 1, keys);
    let command = client.command(&rw10(0x2a, 0, 1), FINAL | flag::WRITE, 512, 512);
    let mut bytes = client.encode(command.as_bytes(), &[0xee; 512]);
    bytes[40] ^= 1;
    client.stream.write_all(&bytes).unwrap();
    assert!(client.is_closed());
    let mut client = Client::login(&server, 1, keys);
    let command = client.command(&rw10(0x2a, 0, 1), FINAL | flag::WRITE, 512, 512);
    let mut bytes = client.encode(command.as_bytes(), &[0xee; 512]);
    bytes[100] ^= 1;
    client.stream.write_all(&bytes).unwrap();
    let answer = client.recv().unwrap();
    assert_eq!((answer.code(), answer.raw[2]), (opcode::REJECT, 0x02));
    assert!(client.is_closed());
    assert_eq!(server.store.bytes(lh_block::Extent::new(0, 512)), [0; 512]);
    witness.is_well(&server);
}

#[test]
fn logins_that_are_none() {
    let server = Running::start();
    let mut witness = Witness::new(&server);
    let request = |len| login_request(1, 0x87, len);
    let text = |bytes: &[u8]| {
        let mut pdu = request(bytes.len()).as_bytes().to_vec();
        pdu.extend_from_slice(bytes);
        pdu.resize(pdu.len().next_multiple_of(4), 0);
        pdu
    };
    let cases: [(&str, Vec<u8>); 6] = [
        (
            "another protocol",
            b"GET / HTTP/1.1\r\nHost: example\r\nUser-Agent: somebody who is lost\r\n\r\n".to_vec(),
        ),
        ("a command", header(0x01, 0x80, 0, 0).to_vec()),
        ("a login of 16 MiB", request(0xff_ffff).as_bytes().to_vec()),
        ("no text", text(b"")),
        ("no pairs", text(&[0xff; 300])),
        ("zeroes", vec![0; 4096]),
    ];
    for (what, bytes) in cases {
        let mut stream = server.connect();
        stream.write_all(&bytes).unwrap();
        let mut client = Client {
            stream,
            header_digest: false,
            data_digest: false,
            cmd_sn: 0,
            itt: 0,
            max_cmd_sn: 0,
            lun: 1,
            tsih: 0,
            ttt: NO_TAG,
            text: String::new(),
        };
        assert!(client.is_closed(), "{what}");
    }
    witness.is_well(&server);
}

#[test]
fn a_truncated_pdu_changes_nothing() {
    let server = Running::start();
    let mut witness = Witness::new(&server);
    for cut in [1, 47, 48, 49, 300, 559] {
        let mut client = Client::login(&server, 1, PLAIN);
        client.ready();
        let command = client.command(&rw10(0x2a, 0, 1), FINAL | flag::WRITE, 512, 512);
        let bytes = client.encode(command.as_bytes(), &[0xee; 512]);
        client.stream.write_all(&bytes[..cut]).unwrap();
    }
    assert_eq!(server.store.bytes(lh_block::Extent::new(0, 512)), [0; 512]);
    witness.is_well(&server);
}

#[test]
fn who_is_slow_loses_his_place() {
    in_time(|pace| {
        let setup = Setup { limits: |limits| limits.patience_s = 4, ..Setup::default() };
        let server = setup.start();
        // Half a login; half a PDU; data that was asked for and does not come.
        let mut stream = server.connect();
        stream.write_all(&login_request(1, 0x87, 100).as_bytes()[..20]).unwrap();
        let login = |isid| pace.within(Duration::from_secs(1), || Client::login(&server, isid, PLAIN));
        let (mut half, mut silent) = (login(2), login(3));
        half.stream.write_all(&header(0x01, 0x80, 0, 0)[..30]).unwrap();
        silent.ready();
        silent.start(&rw10(0x2a, 0, 8), FINAL | flag::WRITE, 4096);
        assert!(half.is_closed() && silent.is_closed());
        server.until("all have gone", |load| load.connections == 0 && load.commands == 0);
        assert_eq!(server.load().payload_bytes, 0);
    });
}

/// Memory for what was asked for is kept until it has come: who sends it crumb by crumb would have it for ever.
#[test]
fn who_sends_what_was_asked_for_crumb_by_crumb_is_closed() {
    in_time(|pace| {
        let setup = Setup { limits: |limits| limits.patience_s = 3, ..Setup::default() };
        let server = setup.start();
        let login = || pace.within(Duration::from_secs(1), || Client::login(&server, 1, PLAIN));
        let mut client = login();
        client.ready();
        let tag = client.start(&rw10(0x2a, 0, 2048), FINAL | flag::WRITE, 1 << 20);
        let r2t = client.recv().unwrap();
        let begun = Instant::now();
        for data_sn in 0.. {
            let data = DataOut {
                opcode: opcode::DATA_OUT,
                data: [0, 0, 4],
                itt: tag.into(),
                ttt: r2t.u32_at(20).into(),
                data_sn: u32::into(data_sn),
                offset: (4 * data_sn).into(),
                ..DataOut::default()
            };
            // It may have been closed in between.
            let _ = client.send(data.as_bytes(), &[7; 4]);
            std::thread::sleep(Duration::from_millis(100));
            if server.load().connections == 0 {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(20), "it is not closed");
        }
        let load = server.load();
        assert_eq!((load.connections, load.commands, load.payload_bytes), (0, 0, 0));
        // Time counts only while something is owed.
        let mut client = login();
        client.ready();
        for _ in 0..8 {
            pace.within(Duration::from_millis(1600), || {
                std::thread::sleep(Duration::from_millis(600));
                assert_eq!(client.write(0, &[7; 4096], 0).status, 0);
            });
        }
    });
}

/// A connection as over a network whose packets are short: the kernel keeps little of what is sent, and lets it go bit by bit.
fn over_short_packets(server: &Running) -> TcpStream {
    let socket = socket(AddressFamily::Inet, SockType::Stream, SockFlag::SOCK_CLOEXEC, None).unwrap();
    setsockopt(&socket, sockopt::TcpMaxSeg, &536).unwrap();
    setsockopt(&socket, sockopt::RcvBuf, &(16 << 10)).unwrap();
    let SocketAddr::V4(address) = server.address else { panic!("{}", server.address) };
    connect(socket.as_raw_fd(), &SockaddrIn::from(address)).unwrap();
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// However short the segments are that an initiator takes, and a send with them.
#[test]
fn who_takes_its_answers_crumb_by_crumb_is_closed() {
    in_time(|pace| {
        let limits = |limits: &mut Limits| (limits.patience_s, limits.ping_s) = (4, 1000);
        let server = Setup { limits, ..Setup::default() }.start();
        let text =
            format!("InitiatorName=iqn.test\0TargetName={}\0MaxRecvDataSegmentLength=512\0", server.name);
        let login = || Client::over(over_short_packets(&server), 1, &text).unwrap();
        let mut client = pace.within(Duration::from_secs(1), login);
        client.ready();
        for _ in 0..8 {
            client.start(&rw10(0x28, 0, 2048), FINAL | flag::READ, 1 << 20);
        }
        // 140 KiB in a second.
        let begun = Instant::now();
        let mut piece = [0; 14 << 10];
        while server.load().connections > 0 {
            assert!(begun.elapsed() < Duration::from_secs(20), "it is not closed");
            let _ = client.stream.read(&mut piece);
            std::thread::sleep(Duration::from_millis(100));
        }
        let load = server.load();
        assert_eq!((load.commands, load.payload_bytes), (0, 0));
    });
}

/// Nor does it keep that memory by sending something else.
#[test]
fn who_pings_instead_of_sending_what_was_asked_for_is_closed() {
    in_time(|pace| {
        let setup = Setup { limits: |limits| limits.patience_s = 3, ..Setup::default() };
        let server = setup.start();
        let mut client = pace.within(Duration::from_secs(1), || Client::login(&server, 1, PLAIN));
        client.ready();
        client.start(&rw10(0x2a, 0, 2048), FINAL | flag::WRITE, 1 << 20);
        assert_eq!(client.recv().unwrap().code(), opcode::R2T);
        // A MiB in a second, of pings that want no answer.
        let mut ping = header(opcode::NOP_OUT | 0x40, FINAL, 0, 128 << 10);
        ping[16..24].fill(0xff);
        ping[24..28].copy_from_slice(&client.cmd_sn.to_be_bytes());
        let begun = Instant::now();
        while server.load().connections > 0 {
            assert!(begun.elapsed() < Duration::from_secs(20), "it is not closed");
            // It may have been closed in between.
            let _ = client.send(&ping, &[7; 128 << 10]);
            std::thread::sleep(Duration::from_millis(100));
        }
        let load = server.load();
        assert_eq!((load.commands, load.payload_bytes), (0, 0));
    });
}

/// Pings are answered at once, with what came with them, and outside of the window.
#[test]
fn who_takes_no_answers_to_pings_is_not_read_from() {
    let server = Running::start();
    let mut witness = Witness::new(&server);
    let mut client = Client::login(&server, 1, PLAIN);
    client.stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    let mut ping = header(opcode::NOP_OUT | 0x40, FINAL, 0, 8192);
    ping[20..24].copy_from_slice(&NO_TAG.to_be_bytes());
    ping[24..28].copy_from_slice(&client.cmd_sn.to_be_bytes());
    let mut sent = 0;
    while sent < 64 << 20 && client.send(&ping, &[7; 8192]).is_ok() {
        sent += 8192;
    }
    assert!(sent < 48 << 20, "{sent} bytes were taken");
    let used = server.inside(|inside| inside.pool.used_bytes());
    assert!(used < 4 << 20, "{used} bytes of the pool");
    drop(client);
    witness.is_well(&server);
}

/// Text goes on until it is as long as any text may be.
#[test]
fn text_without_an_end_is_rejected() {
    let server = Running::start();
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    client.ttt = NO_TAG;
    let piece = [b'x'; 4096];
    let mut answers = Vec::new();
    for _ in 0..3 {
        let itt = client.itt;
        client.simple(opcode::TEXT_REQUEST, flag::CONTINUE, &piece);
        let answer = client.recv().unwrap();
        answers.push((answer.code(), answer.raw[2]));
        // All parts of a text have one tag, and ours behind the first.
        (client.itt, client.ttt) = (itt, 2);
    }
    assert_eq!(answers, [(opcode::TEXT_RESPONSE, 0), (opcode::TEXT_RESPONSE, 0), (opcode::REJECT, 0x09)]);
    assert_eq!(client.read(0, 1).status, 0);
}

#[test]
fn who_takes_no_answers_is_not_read_from() {
    let server = Running::start();
    let mut witness = Witness::new(&server);
    let mut client = Client::login(&server, 1, PLAIN);
    client.ready();
    client.stream.set_write_timeout(Some(Duration::from_millis(500))).unwrap();
    // 1 MiB each, and none is taken: the window is full sooner or later, and after it the socket.
    let limits = Limits::of_pool(&lh_ring::Pool::new(8 << 20, 64 << 20).unwrap());
    for _ in 0..limits.window {
        client.start(&rw10(0x28, 0, 2048), FINAL | flag::READ, 1 << 20);
    }
    // Beyond the window nothing is taken, immediate requests apart.
    for _ in 0..100 {
        client.start(&rw10(0x28, 0, 2048), FINAL | flag::READ, 1 << 20);
    }
    server.until("all are there", |load| load.payload_bytes > 0);
    assert_eq!(witness.0.read(64, 8).data, [0x77; 4096]);
    let (load, used) = server.inside(|inside| (inside.server.load(), inside.pool.used_bytes()));
    assert!(load.payload_bytes <= limits.payload_bytes && used <= 64 << 20, "{load:?} {used}");
    assert!(load.commands <= limits.window as usize + 1);
    drop(client);
    witness.is_well(&server);
}

#[test]
fn places_are_bounded() {
    let setup = Setup { limits: |limits| (limits.sessions, limits.connections) = (2, 4), ..Setup::default() };
    let server = setup.start();
    let _one = Client::login(&server, 1, PLAIN);
    let mut two = Client::login(&server, 2, PLAIN);
    two.ready();
    assert_eq!(Client::try_login(&server, 3, PLAIN).err(), Some(0x0302));
    // The same port again takes the place of its session.
    let mut again = Client::login(&server, 2, PLAIN);
    assert!(two.is_closed());
    again.ready();
    let idle = [server.connect(), server.connect()];
    server.until("four connections", |load| load.connections == 4);
    // Who logs in takes the place of one that has said nothing.
    assert_eq!(Client::try_login(&server, 4, PLAIN).err(), Some(0x0302));
    server.until("one of them is gone", |load| load.connections == 3);
    again.ready_or_well();
    drop(idle);
    let setup = Setup { limits: |limits| (limits.sessions, limits.connections) = (4, 2), ..Setup::default() };
    let server = setup.start();
    let mut both = [1, 2].map(|port| Client::login(&server, port, PLAIN));
    assert_eq!(Client::try_login(&server, 3, PLAIN).err(), Some(0xffff));
    both.iter_mut().for_each(Client::ready);
}

/// Random bytes where a PDU should be, in every phase.
#[test]
fn noise() {
    let server = Running::start();
    let mut witness = Witness::new(&server);
    let mut state = 88_172_645_463_325_252_u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for round in 0..200_u32 {
        let mut client = Client::login(&server, 1, PLAIN);
        let mut bytes = Vec::new();
        for _ in 0..20 {
            let mut pdu: Vec<u8> = (0..6).flat_map(|_| random().to_be_bytes()).collect();
            // An operation that exists, lengths that end.
            pdu[0] = [0x00, 0x01, 0x02, 0x04, 0x05, 0x06, 0x10, 0x41][(random() % 8) as usize];
            (pdu[4], pdu[5], pdu[6]) = (0, 0, 0);
            if pdu[0] == opcode::TASK_REQUEST {
                // All but the cold reset, which ends the witness, too.
                pdu[1] = 0x81 + pdu[1] % 6;
            }
            pdu[24..28].copy_from_slice(&client.cmd_sn.to_be_bytes());
            client.cmd_sn += u32::from(pdu[0] & 0x40 == 0 && pdu[0] != 0x05);
            let len = usize::from(pdu[7]).next_multiple_of(4);
            pdu.resize(HEADER + len, round.to_le_bytes()[0]);
            bytes.extend_from_slice(&pdu);
        }
        let _ = client.stream.write_all(&bytes);
    }
    server.until("all have gone", |load| load.connections == 1);
    witness.0.ready_or_well();
}

impl Client {
    /// Noise may hold resets, of which the witness is told.
    fn ready_or_well(&mut self) {
        for _ in 0..16 {
            self.start(&[0; 6], FINAL, 0);
            if self.answer(b"").status == 0 {
                return;
            }
        }
        panic!("the session does not recover");
    }
}
