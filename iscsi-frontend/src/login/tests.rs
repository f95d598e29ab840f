use zerocopy::IntoBytes;

use super::*;
use crate::chap::Credentials;

const NAME: &str = "iqn.2019-10.io.longhorn:vol";
const FIRST: &[u8] = b"InitiatorName=iqn.a\0TargetName=iqn.2019-10.io.longhorn:vol\0";
const SEED_BYTES: [u8; SEED] = [7; SEED];

struct Bench {
    login: Login,
    chap: Option<Chap>,
    closed: u16,
    session: Option<Existing>,
}

/// A response: flags, status, TSIH and text.
#[derive(Debug, PartialEq, Eq)]
struct Response {
    flags: u8,
    status: u16,
    tsih: u16,
    text: String,
}

impl Bench {
    fn new() -> Self {
        Self { login: Login::new(SEED_BYTES), chap: None, closed: 0, session: None }
    }

    fn with_chap() -> Self {
        let initiator = Credentials { name: "alice".into(), secret: b"a secret of hers".to_vec() };
        let target = Some(Credentials { name: "vol".into(), secret: b"the target's own".to_vec() });
        Self { chap: Some(Chap { initiator, target }), ..Self::new() }
    }

    fn send(&mut self, request: LoginRequest, data: &[u8]) -> (Progress, Response) {
        let raw: Raw = zerocopy::transmute!(request);
        let session = self.session;
        let offer = Offer {
            target: NAME,
            chap: self.chap.as_ref(),
            first_burst: 16384,
            window: 64,
            tsih: 9,
            session_of: &|_| session,
            closed: self.closed,
        };
        let mut out = Vec::new();
        let progress = self.login.apply(&raw, data, &offer, &mut out);
        let Some((head, text)) = out.split_first_chunk::<48>() else {
            return (progress, Response { flags: 0, status: 0xffff, tsih: 0, text: String::new() });
        };
        let header: LoginResponse = zerocopy::transmute!(*head);
        assert_eq!(out.len() % 4, 0);
        let len = Basic::of(head).data_len();
        let text = String::from_utf8(text[..len].to_vec()).unwrap().replace('\0', ";");
        let response =
            Response { flags: header.flags, status: header.status.get(), tsih: header.tsih.get(), text };
        (progress, response)
    }

    /// A request with these flags and this text.
    fn ask(&mut self, flags: u8, data: &[u8]) -> (Progress, Response) {
        self.send(request(flags), data)
    }

    fn refused(&mut self, flags: u8, data: &[u8]) -> u16 {
        match self.ask(flags, data) {
            (Progress::Refused(status), response) => {
                assert_eq!((response.status, response.flags), (status, 0));
                status
            }
            other => panic!("{other:?}"),
        }
    }
}

fn request(flags: u8) -> LoginRequest {
    LoginRequest {
        opcode: 0x43,
        flags,
        isid: [0x40, 0, 1, 0x37, 0, 0],
        itt: 5.into(),
        cmd_sn: 100.into(),
        exp_stat_sn: 3.into(),
        ..LoginRequest::default()
    }
}

/// A session that is there.
fn existing(tsih: u16, cid: u16) -> Existing {
    Existing { tsih, cid, agreed: Agreed::new() }
}

/// Transit bits: security to operational, operational to full feature, security to full feature.
const TO_OPERATIONAL: u8 = 0x81;
const TO_FULL: u8 = 0x87;
const SECURITY_TO_FULL: u8 = 0x83;

#[test]
fn a_plain_login_in_one_request() {
    let mut bench = Bench::new();
    let text = [FIRST, b"HeaderDigest=CRC32C\0InitialR2T=No\0Odd=1\0"].concat();
    let (progress, response) = bench.ask(TO_FULL, &text);
    let Progress::Established(established) = progress else { panic!("{progress:?}") };
    assert_eq!((response.flags, response.status, response.tsih), (0x87, 0, 9));
    let expected = "TargetPortalGroupTag=1;HeaderDigest=CRC32C;InitialR2T=No;Odd=NotUnderstood;\
        MaxRecvDataSegmentLength=262144;";
    assert_eq!(response.text, expected);
    assert_eq!(established.port(), "iqn.a,i,0x400001370000");
    assert_eq!((established.cmd_sn, established.stat_sn, established.kind), (100, 4, Kind::Normal));
    assert!(established.agreed.header_digest && !established.agreed.initial_r2t);
}

#[test]
fn through_security_without_a_secret() {
    let mut bench = Bench::new();
    let (progress, response) = bench.ask(TO_OPERATIONAL, &[FIRST, b"AuthMethod=CHAP,None\0"].concat());
    assert_eq!((progress, response.flags), (Progress::More, 0x81));
    assert_eq!(response.text, "TargetPortalGroupTag=1;AuthMethod=None;");
    assert!(matches!(bench.ask(TO_FULL, b"MaxBurstLength=4096\0").0, Progress::Established(_)));
    // From security straight to the end.
    assert!(matches!(Bench::new().ask(SECURITY_TO_FULL, FIRST).0, Progress::Established(_)));
    assert_eq!(Bench::new().refused(TO_OPERATIONAL, &[FIRST, b"AuthMethod=CHAP\0"].concat()), 0x0201);
}

#[test]
fn discovery_needs_no_target() {
    let mut bench = Bench::new();
    let (progress, _) = bench.ask(TO_FULL, b"InitiatorName=iqn.a\0SessionType=Discovery\0");
    assert!(matches!(progress, Progress::Established(e) if e.kind == Kind::Discovery));
}

#[test]
fn text_in_pieces() {
    let mut bench = Bench::new();
    let (first, second) = FIRST.split_at(30);
    let (progress, response) = bench.ask(0x44, first);
    assert_eq!((progress, response.text.as_str()), (Progress::More, ""));
    assert!(matches!(bench.ask(TO_FULL, second).0, Progress::Established(_)));
    let mut endless = Bench::new();
    assert_eq!(endless.ask(0x44, &[b'x'; 8000]).0, Progress::More);
    assert_eq!(endless.refused(0x44, &[b'x'; 8000]), 0x0302);
}

/// Runs CHAP up to the initiator's response.
fn challenged(bench: &mut Bench) {
    let (_, response) = bench.ask(TO_OPERATIONAL, &[FIRST, b"AuthMethod=CHAP,None\0"].concat());
    assert_eq!((response.flags, response.text.as_str()), (0, "TargetPortalGroupTag=1;AuthMethod=CHAP;"));
    let (_, response) = bench.ask(0, b"CHAP_A=9,5\0");
    assert_eq!(response.text, "CHAP_A=5;CHAP_I=7;CHAP_C=0x07070707070707070707070707070707;");
}

fn response_of(secret: &[u8]) -> String {
    hex(&Algorithm::Md5.respond(7, secret, &[7; CHALLENGE]))
}

#[test]
fn chap_lets_in_who_knows_the_secret() {
    let mut bench = Bench::with_chap();
    challenged(&mut bench);
    let text = format!("CHAP_N=alice\0CHAP_R={}\0", response_of(b"a secret of hers"));
    let (progress, response) = bench.ask(TO_OPERATIONAL, text.as_bytes());
    assert_eq!((progress, response.flags, response.text.as_str()), (Progress::More, 0x81, ""));
    assert!(matches!(bench.ask(TO_FULL, b"").0, Progress::Established(_)));
}

#[test]
fn chap_keeps_everybody_else_out() {
    let right = response_of(b"a secret of hers");
    for text in [
        format!("CHAP_N=alice\0CHAP_R={}\0", response_of(b"a wrong secret")),
        format!("CHAP_N=bob\0CHAP_R={right}\0"),
        format!("CHAP_N=alice\0CHAP_R={}\0", &right[..20]),
        "CHAP_N=alice\0CHAP_R=hello\0".into(),
        format!("CHAP_R={right}\0"),
        String::new(),
    ] {
        let mut bench = Bench::with_chap();
        challenged(&mut bench);
        assert_eq!(bench.refused(TO_OPERATIONAL, text.as_bytes()), 0x0201, "{text:?}");
    }
    // Around it.
    assert_eq!(Bench::with_chap().refused(TO_FULL, FIRST), 0x0201);
    assert_eq!(Bench::with_chap().refused(TO_OPERATIONAL, &[FIRST, b"AuthMethod=None\0"].concat()), 0x0201);
    let mut bench = Bench::with_chap();
    let (progress, response) = bench.ask(SECURITY_TO_FULL, FIRST);
    assert_eq!((progress, response.flags), (Progress::More, 0));
    assert_eq!(bench.refused(TO_FULL, b""), 0x0200);
    let mut bench = Bench::with_chap();
    let (progress, _) = bench.ask(SECURITY_TO_FULL, &[FIRST, b"AuthMethod=CHAP\0"].concat());
    assert_eq!(progress, Progress::More);
    assert_eq!(bench.refused(0, b"CHAP_A=6\0"), 0x0201);
}

#[test]
fn the_target_proves_itself_where_it_is_asked() {
    let right = response_of(b"a secret of hers");
    let mut bench = Bench::with_chap();
    challenged(&mut bench);
    let text = format!("CHAP_N=alice\0CHAP_R={right}\0CHAP_I=3\0CHAP_C=0x0102\0");
    let (progress, response) = bench.ask(TO_OPERATIONAL, text.as_bytes());
    let proof = hex(&Algorithm::Md5.respond(3, b"the target's own", &[1, 2]));
    assert_eq!((progress, response.text), (Progress::More, format!("CHAP_N=vol;CHAP_R={proof};")));
    // Our own challenge, back: no.
    let mut bench = Bench::with_chap();
    challenged(&mut bench);
    let text = format!("CHAP_N=alice\0CHAP_R={right}\0CHAP_I=7\0CHAP_C=0x{}\0", "07".repeat(16));
    assert_eq!(bench.refused(TO_OPERATIONAL, text.as_bytes()), 0x0201);
    // A target that cannot prove itself.
    let mut bench = Bench::with_chap();
    bench.chap.as_mut().unwrap().target = None;
    challenged(&mut bench);
    let text = format!("CHAP_N=alice\0CHAP_R={right}\0CHAP_I=7\0CHAP_C=0x0102\0");
    assert_eq!(bench.refused(TO_OPERATIONAL, text.as_bytes()), 0x0201);
}

#[test]
fn every_refusal_has_its_status() {
    let table: [(&[u8], u16); 8] = [
        (b"TargetName=iqn.2019-10.io.longhorn:vol\0", 0x0207),
        (b"InitiatorName=iqn.a\0", 0x0207),
        (b"InitiatorName=iqn.a\0TargetName=iqn.other\0", 0x0203),
        (b"InitiatorName=iqn.a\0SessionType=Strange\0", 0x0209),
        (b"InitiatorName=\0TargetName=x\0", 0x0200),
        (b"nonsense", 0x0200),
        (b"InitiatorName=iqn.a\xff\0", 0x0200),
        (b"InitiatorName=iqn.a\0TargetName=iqn.2019-10.io.longhorn:vol\0SendTargets=All\0", 0x0200),
    ];
    for (text, status) in table {
        assert_eq!(Bench::new().refused(TO_FULL, text), status, "{}", String::from_utf8_lossy(text));
    }
    let long = [b"InitiatorName=".as_slice(), &[b'n'; 224], b"\0"].concat();
    assert_eq!(Bench::new().refused(TO_FULL, &long), 0x0200);
    let mut bench = Bench::new();
    bench.closed = 0x0301;
    assert_eq!(bench.refused(TO_FULL, FIRST), 0x0301);
}

/// An initiator takes no more than 8 KiB before it has said how much it takes (RFC 7143, 13.12).
#[test]
fn no_answer_is_longer_than_what_an_initiator_takes() {
    let text = |keys: usize| [FIRST, "A=\0".repeat(keys).as_bytes()].concat();
    let (progress, response) = Bench::new().ask(0x04, &text(500));
    assert!(progress == Progress::More && response.text.len() > 7000);
    assert_eq!(Bench::new().refused(0x04, &text(600)), 0x0302);
}

/// RFC 7143, 6.3: in one request, or in two.
#[test]
fn nothing_is_negotiated_twice() {
    for (first, second) in [
        ("HeaderDigest=CRC32C", "HeaderDigest=None"),
        ("FirstBurstLength=512", "FirstBurstLength=512"),
        ("MaxRecvDataSegmentLength=8192", "MaxRecvDataSegmentLength=4096"),
        ("AuthMethod=None", "AuthMethod=None"),
    ] {
        let both = format!("{first}\0{second}\0");
        assert_eq!(
            Bench::new().refused(TO_OPERATIONAL, &[FIRST, both.as_bytes()].concat()),
            0x0200,
            "{both}"
        );
        let mut bench = Bench::new();
        let (progress, _) = bench.ask(TO_OPERATIONAL, &[FIRST, first.as_bytes(), b"\0"].concat());
        assert_eq!(progress, Progress::More);
        assert_eq!(bench.refused(TO_FULL, format!("{second}\0").as_bytes()), 0x0200, "{second} again");
    }
    let mut bench = Bench::with_chap();
    challenged(&mut bench);
    let right = format!("CHAP_N=alice\0CHAP_R={}\0", response_of(b"a secret of hers"));
    assert_eq!(bench.refused(TO_OPERATIONAL, right.repeat(2).as_bytes()), 0x0200);
    // Who it is may be said in every request, and what is not known may be asked for again.
    let mut bench = Bench::new();
    let odd = [FIRST, b"X-odd=1\0"].concat();
    assert_eq!(bench.ask(TO_OPERATIONAL, &odd).0, Progress::More);
    assert!(matches!(bench.ask(TO_FULL, &odd).0, Progress::Established(_)));
}

/// RFC 7143, 13.14: whatever was said of it, and whichever was said first.
#[test]
fn a_first_burst_is_never_longer_than_a_burst() {
    for text in [
        "FirstBurstLength=8192\0MaxBurstLength=4096\0",
        "MaxBurstLength=4096\0FirstBurstLength=8192\0",
        "MaxBurstLength=4096\0",
    ] {
        let (progress, _) = Bench::new().ask(TO_FULL, &[FIRST, text.as_bytes()].concat());
        let Progress::Established(established) = progress else { panic!("{progress:?}") };
        let agreed = established.agreed;
        assert_eq!((agreed.first_burst(), agreed.max_burst), (4096, 4096), "{text:?}");
    }
}

/// RFC 7143, 13.14: both sides know the same first burst, which is in the answer.
#[test]
fn the_answer_to_a_first_burst_is_never_longer_than_a_burst() {
    // Of two requests: the keys of each, and what is answered.
    let both = "MaxBurstLength=4096;FirstBurstLength=4096;";
    let table = [
        ("FirstBurstLength=8192\0MaxBurstLength=4096\0", both, "", ""),
        ("MaxBurstLength=4096\0FirstBurstLength=8192\0", both, "", ""),
        (
            "MaxBurstLength=4096\0",
            "MaxBurstLength=4096;",
            "FirstBurstLength=8192\0",
            "FirstBurstLength=4096;",
        ),
        (
            "FirstBurstLength=4096\0",
            "FirstBurstLength=4096;",
            "MaxBurstLength=4096\0",
            "MaxBurstLength=4096;",
        ),
        // Agreed on already, and there is no taking it back: what held of the other goes on to hold (6.2).
        (
            "FirstBurstLength=8192\0",
            "FirstBurstLength=8192;",
            "MaxBurstLength=4096\0",
            "MaxBurstLength=Reject;",
        ),
        // The room that there is, and no more.
        (
            "FirstBurstLength=16777215\0MaxBurstLength=16777215\0",
            "MaxBurstLength=1048576;FirstBurstLength=16384;",
            "",
            "",
        ),
    ];
    for (first, first_answer, second, second_answer) in table {
        let mut bench = Bench::new();
        let (progress, response) = bench.ask(0x04, &[FIRST, first.as_bytes()].concat());
        assert_eq!(progress, Progress::More);
        let expected = format!("TargetPortalGroupTag=1;{first_answer}MaxRecvDataSegmentLength=262144;");
        assert_eq!(response.text, expected, "{first:?}");
        let (progress, response) = bench.ask(TO_FULL, second.as_bytes());
        assert_eq!(response.text, second_answer, "{first:?} {second:?}");
        let Progress::Established(established) = progress else { panic!("{progress:?}") };
        // What counts is what was said.
        let said = |key: &str| {
            let all = format!("{first_answer}{second_answer}");
            let value =
                all.split(';').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('=')?.parse().ok());
            value as Option<u32>
        };
        let agreed = established.agreed;
        assert_eq!(said("FirstBurstLength"), Some(agreed.first_burst()));
        assert_eq!(said("MaxBurstLength").unwrap_or(262_144), agreed.max_burst);
    }
}

#[test]
fn a_full_target_takes_back_who_has_a_session() {
    let mut bench = Bench::new();
    (bench.closed, bench.session) = (0x0302, Some(existing(4, 0)));
    assert!(matches!(bench.ask(TO_FULL, FIRST).0, Progress::Established(_)));
    let mut bench = Bench::new();
    bench.closed = 0x0302;
    assert_eq!(bench.refused(TO_FULL, FIRST), 0x0302);
    // What discovers takes nobody's place.
    let mut bench = Bench::new();
    (bench.closed, bench.session) = (0x0302, Some(existing(4, 0)));
    assert_eq!(bench.refused(TO_FULL, b"InitiatorName=iqn.a\0SessionType=Discovery\0"), 0x0302);
}

#[test]
fn a_handle_is_of_a_session_that_is_there() {
    let mut bench = Bench::new();
    bench.session = Some(existing(4, 0));
    let (progress, response) = bench.send(LoginRequest { tsih: 4.into(), ..request(TO_FULL) }, FIRST);
    assert!(matches!(progress, Progress::Established(e) if e.tsih == 4));
    assert_eq!(response.tsih, 4);
    let (progress, _) = Bench::new().send(LoginRequest { tsih: 4.into(), ..request(TO_FULL) }, FIRST);
    assert_eq!(progress, Progress::Refused(0x020a));
}

/// RFC 7143, 6.3.1: which sessions and connections are there, and what becomes of a login. There is one connection per session.
#[test]
fn a_login_is_of_a_new_session_or_of_a_connection_that_is_there() {
    let refused = Progress::Refused;
    // The session that is there; the handle and the connection that are asked for.
    let table = [
        (None, 0, 0, None),
        (None, 0, 7, None),
        (None, 4, 0, Some(refused(0x020a))),
        (Some(existing(4, 7)), 0, 7, None),
        (Some(existing(4, 7)), 0, 8, None),
        (Some(existing(4, 7)), 4, 7, None),
        (Some(existing(4, 7)), 4, 8, Some(refused(0x0206))),
        (Some(existing(4, 7)), 5, 7, Some(refused(0x020a))),
        (Some(existing(4, 7)), 5, 8, Some(refused(0x020a))),
    ];
    for (session, tsih, cid, refusal) in table {
        let mut bench = Bench::new();
        bench.session = session;
        let request = LoginRequest { tsih: tsih.into(), cid: cid.into(), ..request(TO_FULL) };
        let (progress, response) = bench.send(request, FIRST);
        match (progress, refusal) {
            (Progress::Established(established), None) => {
                assert_eq!((established.tsih, established.cid), (tsih, cid));
                assert_eq!(response.tsih, if tsih == 0 { 9 } else { tsih });
            }
            (progress, refusal) => assert_eq!(Some(progress), refusal, "{session:?} {tsih} {cid}"),
        }
    }
    // Of what discovers there is no handle.
    let mut bench = Bench::new();
    bench.session = Some(existing(4, 0));
    let request = LoginRequest { tsih: 4.into(), ..request(TO_FULL) };
    let (progress, _) = bench.send(request, b"InitiatorName=iqn.a\0SessionType=Discovery\0");
    assert_eq!(progress, refused(0x020a));
}

/// A session may have gone, or another one may have taken its place, while its initiator proves who it is.
#[test]
fn a_handle_is_looked_at_again_when_the_login_is_over() {
    for (later, status) in [(None, 0x020a), (Some(existing(5, 0)), 0x020a), (Some(existing(4, 1)), 0x0206)] {
        let mut bench = Bench::new();
        bench.session = Some(existing(4, 0));
        let of = |flags| LoginRequest { tsih: 4.into(), ..request(flags) };
        assert_eq!(bench.send(of(TO_OPERATIONAL), FIRST).0, Progress::More);
        bench.session = later;
        assert_eq!(bench.send(of(TO_FULL), b"").0, Progress::Refused(status), "{later:?}");
    }
}

/// RFC 7143, 6.3.4 and 6.3.6: keys of the session are not said again; those of a connection are.
#[test]
fn a_connection_that_is_reinstated_has_what_its_session_has() {
    let of_session =
        Agreed { initial_r2t: false, max_burst: 8192, said_first_burst: Some(4096), ..Agreed::new() };
    let agreed = Agreed { header_digest: true, data_digest: true, send_segment: 512, ..of_session };
    for (tsih, text, expected) in [
        (4, "", of_session),
        (4, "DataDigest=CRC32C\0", Agreed { data_digest: true, ..of_session }),
        (0, "", Agreed::new()),
    ] {
        let mut bench = Bench::new();
        bench.session = Some(Existing { tsih: 4, cid: 0, agreed });
        let request = LoginRequest { tsih: tsih.into(), ..request(TO_FULL) };
        let (progress, _) = bench.send(request, &[FIRST, text.as_bytes()].concat());
        let Progress::Established(established) = progress else { panic!("{progress:?}") };
        assert_eq!(established.agreed, expected, "{tsih} {text}");
    }
}

/// Which requests may follow which: current stage and next stage of the first and of the second request.
#[test]
fn stages_only_go_forward() {
    let refused = Progress::Refused(0x0200);
    // From the start: stages 2 and 3 are none, and nothing leads to stage 2, back, or nowhere.
    for flags in [0x08, 0x0c, 0x82, 0x80, 0x84, 0x85, 0x86, 0xc7] {
        assert_eq!(Bench::new().ask(flags, FIRST).0, refused, "{flags:#x}");
    }
    // After security: once in operational, never back.
    for flags in [0x00, 0x81, 0x83] {
        let mut bench = Bench::new();
        assert_eq!(bench.ask(TO_OPERATIONAL, FIRST).0, Progress::More);
        assert_eq!(bench.ask(flags, b"").0, refused, "{flags:#x}");
    }
    // Text in pieces does not go from one stage to another (11.12.3).
    let mut bench = Bench::new();
    assert_eq!(bench.ask(0x40, FIRST).0, Progress::More);
    assert_eq!(bench.ask(TO_FULL, b"").0, refused);
    // Without a transition there is none.
    let mut bench = Bench::new();
    assert_eq!(bench.ask(0x00, FIRST).0, Progress::More);
    assert_eq!(bench.ask(TO_FULL, b"").0, refused);
}

#[test]
fn later_requests_are_of_the_same_login() {
    let changes: [fn(&mut LoginRequest); 4] =
        [|r| r.isid[5] = 9, |r| r.itt = 6.into(), |r| r.cid = 1.into(), |r| r.tsih = 1.into()];
    for change in changes {
        let mut bench = Bench::new();
        assert_eq!(bench.ask(TO_OPERATIONAL, FIRST).0, Progress::More);
        let mut second = request(TO_FULL);
        change(&mut second);
        assert_eq!(bench.send(second, b"").0, Progress::Refused(0x0200));
    }
}

#[test]
fn another_version_another_operation_and_no_end() {
    let (progress, _) = Bench::new().send(LoginRequest { version_min: 1, ..request(TO_FULL) }, FIRST);
    assert_eq!(progress, Progress::Refused(0x0205));
    let command = LoginRequest { opcode: 0x01, ..request(TO_FULL) };
    assert_eq!(Bench::new().send(command, FIRST).0, Progress::Broken);
    // Once there is a login, its initiator is told (6.3).
    let mut bench = Bench::new();
    assert_eq!(bench.ask(TO_OPERATIONAL, FIRST).0, Progress::More);
    let (progress, response) = bench.send(command, b"");
    assert_eq!((progress, response.status, response.flags), (Progress::Refused(0x020b), 0x020b, 0));
    assert_eq!(command.as_bytes().len(), 48);
    let mut bench = Bench::new();
    let mut asked = 0;
    while bench.ask(0x04, FIRST).0 == Progress::More {
        asked += 1;
    }
    assert_eq!(asked, REQUESTS_MAX);
}

/// Recorded logins with bytes changed: each ends in an answer, no answer is long, and every outcome is reached.
#[test]
fn changed_logins_come_to_an_end() {
    let right = response_of(b"a secret of hers");
    let recorded: [(u8, Vec<u8>); 4] = [
        (TO_OPERATIONAL, [FIRST, b"AuthMethod=CHAP,None\0"].concat()),
        (0, b"CHAP_A=5\0".to_vec()),
        (TO_OPERATIONAL, format!("CHAP_N=alice\0CHAP_R={right}\0CHAP_I=3\0CHAP_C=0x0102\0").into_bytes()),
        (TO_FULL, b"HeaderDigest=CRC32C\0MaxBurstLength=65536\0InitialR2T=No\0".to_vec()),
    ];
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut random = |n: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).unwrap() % n
    };
    let (mut established, mut refused, mut unfinished) = (0, std::collections::BTreeSet::new(), 0);
    for _ in 0..20_000 {
        let mut bench = Bench::with_chap();
        let mut last = Progress::More;
        for (flags, text) in &recorded {
            let (mut request, mut text) = (request(*flags), text.clone());
            match random(10) {
                0 => request.flags ^= 1 << random(8),
                1 | 2 => {
                    let at = random(text.len());
                    text[at] ^= 1 << random(8);
                }
                3 => text.truncate(random(text.len())),
                4 => request.version_min = random(2).to_le_bytes()[0],
                _ => {}
            }
            let (progress, response) = bench.send(request, &text);
            assert!(response.text.len() < 1024);
            last = progress;
            if last != Progress::More {
                break;
            }
        }
        match last {
            Progress::Established(_) => established += 1,
            Progress::Refused(status) => drop(refused.insert(status)),
            Progress::More => unfinished += 1,
            Progress::Broken => panic!("the operation was not changed"),
        }
    }
    assert!(established > 1000 && unfinished > 10, "{established} {unfinished}");
    assert!(refused.len() >= 5, "{refused:x?}");
}
