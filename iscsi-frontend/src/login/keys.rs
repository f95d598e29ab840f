//! Operational keys (RFC 7143, chapter 13): what both sides agree on for a session.

use crate::text::{number, push};

/// Longest data segment that is taken: large enough for 1 MiB in four pieces, small enough to wait for as a whole.
pub const RECV_SEGMENT_MAX: u32 = 256 << 10;

/// MaxBurstLength that is offered: the longest command in one sequence.
const BURST_MAX: u32 = 1 << 20;

/// Most that a segment or burst can be (13.12 to 13.14).
const LENGTHS: std::ops::RangeInclusive<u32> = 512..=(1 << 24) - 1;

/// MaxRecvDataSegmentLength of an initiator that does not say (13.12).
const SEGMENT_DEFAULT: u32 = 8192;

/// MaxBurstLength where nobody has said (13.13).
const BURST_DEFAULT: u32 = 256 << 10;

/// FirstBurstLength where nobody has said (13.14): such an initiator may send so much, whatever there is room for.
const FIRST_BURST_DEFAULT: u32 = 64 << 10;

/// What was agreed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreed {
    /// Headers carry a CRC-32C.
    pub header_digest: bool,
    /// Data segments carry a CRC-32C.
    pub data_digest: bool,
    /// Longest data segment that the initiator takes.
    pub send_segment: u32,
    /// Longest sequence of Data-In, or of Data-Out after an R2T.
    pub max_burst: u32,
    /// Most data that a command brings unasked for, where that was said.
    pub said_first_burst: Option<u32>,
    /// No unsolicited Data-Out: everything behind the immediate data is asked for.
    pub initial_r2t: bool,
    /// Commands bring data in their own PDU.
    pub immediate_data: bool,
}

impl Agreed {
    /// What holds before anything was negotiated.
    pub const fn new() -> Self {
        Self {
            header_digest: false,
            data_digest: false,
            send_segment: SEGMENT_DEFAULT,
            max_burst: BURST_DEFAULT,
            said_first_burst: None,
            initial_r2t: true,
            immediate_data: true,
        }
    }

    /// The same for another connection of the session: digests and the longest segment are each connection's own.
    pub(super) const fn of_session(self) -> Self {
        let Self { header_digest, data_digest, send_segment, .. } = Self::new();
        Self { header_digest, data_digest, send_segment, ..self }
    }

    /// How many commands a session may have at a time, where there is room for `most` of them with `room` bytes of
    /// unsolicited data each: fewer, if it may send more with each.
    pub fn window(&self, room: u32, most: u32) -> u32 {
        match self.unsolicited() {
            asked if asked <= room => most,
            asked => (u64::from(room) * u64::from(most) / u64::from(asked)).max(1).try_into().unwrap_or(most),
        }
    }

    /// Most data that a command brings unasked for: never more than a burst (13.14), whatever was said.
    pub fn first_burst(&self) -> u32 {
        self.said_first_burst.unwrap_or(FIRST_BURST_DEFAULT).min(self.max_burst)
    }

    /// Most bytes that a command may bring before it is asked.
    pub fn unsolicited(&self) -> u32 {
        if self.immediate_data || !self.initial_r2t { self.first_burst() } else { 0 }
    }

    /// Takes one key after the login, when an initiator may say anew which segments it takes (13.12), and nothing else. False
    /// for a key that is none of these.
    pub(crate) fn declare(&mut self, key: &str, value: &str, out: &mut Vec<u8>) -> bool {
        let before = *self;
        let answer = out.len();
        if !self.negotiate(key, value, FIRST_BURST_DEFAULT, out) {
            return false;
        }
        if key != "MaxRecvDataSegmentLength" {
            *self = before;
            out.truncate(answer);
            push(out, key, "Reject");
        }
        true
    }

    /// Takes one key of the initiator's and writes the answer, if there has to be one; of unsolicited data there is room
    /// for `room` bytes per command. False for a key that is none of these.
    pub(super) fn negotiate(&mut self, key: &str, value: &str, room: u32, out: &mut Vec<u8>) -> bool {
        match key {
            "HeaderDigest" => digest(key, value, &mut self.header_digest, out),
            "DataDigest" => digest(key, value, &mut self.data_digest, out),
            "MaxRecvDataSegmentLength" => match number(value).filter(|n| LENGTHS.contains(n)) {
                // Declared, not negotiated: no answer.
                Some(n) => self.send_segment = n,
                None => push(out, key, "Reject"),
            },
            "MaxBurstLength" => {
                // A first burst that has been agreed on cannot be taken back, and no burst is shorter.
                let from = self.said_first_burst.unwrap_or(*LENGTHS.start());
                if let Some(n) = least(key, value, from, BURST_MAX, out) {
                    self.max_burst = n;
                }
            }
            "FirstBurstLength" => {
                let most = room.min(self.max_burst);
                if let Some(n) = least(key, value, *LENGTHS.start(), most, out) {
                    self.said_first_burst = Some(n);
                }
            }
            // Whether the initiator may send without being asked is its choice: the window has room for it.
            "InitialR2T" => yes_or_no(key, value, |theirs| theirs, &mut self.initial_r2t, out),
            "ImmediateData" => yes_or_no(key, value, |theirs| theirs, &mut self.immediate_data, out),
            "DataPDUInOrder" | "DataSequenceInOrder" => yes_or_no(key, value, |_| true, &mut true, out),
            "OFMarker" | "IFMarker" => push(out, key, "No"),
            "OFMarkInt" | "IFMarkInt" => push(out, key, "Irrelevant"),
            "MaxConnections" | "MaxOutstandingR2T" => {
                ranged(key, value, 1..=65535, |_| 1, out);
            }
            "ErrorRecoveryLevel" => ranged(key, value, 0..=2, |_| 0, out),
            // A new login may come at once, and nothing is kept for it: its commands end before it is answered.
            "DefaultTime2Wait" => ranged(key, value, 0..=3600, |theirs| theirs, out),
            "DefaultTime2Retain" => ranged(key, value, 0..=3600, |_| 0, out),
            "iSCSIProtocolLevel" => ranged(key, value, 0..=31, |theirs| theirs.min(1), out),
            "TaskReporting" => {
                let known = value.split(',').any(|v| v == "RFC3720");
                push(out, key, if known { "RFC3720" } else { "Reject" });
            }
            _ => return false,
        }
        true
    }
}

impl Default for Agreed {
    fn default() -> Self {
        Self::new()
    }
}

fn digest(key: &str, value: &str, on: &mut bool, out: &mut Vec<u8>) {
    // The first of the initiator's that is known (6.2.1).
    match value.split(',').find(|v| matches!(*v, "None" | "CRC32C")) {
        Some(choice) => {
            *on = choice == "CRC32C";
            push(out, key, choice);
        }
        None => push(out, key, "Reject"),
    }
}

fn least(key: &str, value: &str, from: u32, ours: u32, out: &mut Vec<u8>) -> Option<u32> {
    let Some(theirs) = number(value).filter(|n| (from..=*LENGTHS.end()).contains(n)) else {
        push(out, key, "Reject");
        return None;
    };
    let result = theirs.min(ours);
    push(out, key, &result.to_string());
    Some(result)
}

fn yes_or_no(key: &str, value: &str, decide: fn(bool) -> bool, to: &mut bool, out: &mut Vec<u8>) {
    let theirs = match value {
        "Yes" => true,
        "No" => false,
        _ => return push(out, key, "Reject"),
    };
    *to = decide(theirs);
    push(out, key, if *to { "Yes" } else { "No" });
}

fn ranged(
    key: &str,
    value: &str,
    range: std::ops::RangeInclusive<u32>,
    decide: fn(u32) -> u32,
    out: &mut Vec<u8>,
) {
    match number(value).filter(|n| range.contains(n)) {
        Some(theirs) => push(out, key, &decide(theirs).to_string()),
        None => push(out, key, "Reject"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(agreed: &mut Agreed, key: &str, value: &str) -> String {
        let mut out = Vec::new();
        assert!(agreed.negotiate(key, value, 16384, &mut out), "{key}");
        String::from_utf8(out).unwrap().trim_end_matches('\0').to_owned()
    }

    #[test]
    fn every_key_has_its_answer() {
        let mut agreed = Agreed::new();
        let table = [
            ("HeaderDigest", "CRC32C,None", "HeaderDigest=CRC32C"),
            ("DataDigest", "X-foo,None,CRC32C", "DataDigest=None"),
            ("DataDigest", "X-foo", "DataDigest=Reject"),
            ("MaxRecvDataSegmentLength", "262144", ""),
            ("MaxRecvDataSegmentLength", "5", "MaxRecvDataSegmentLength=Reject"),
            ("MaxBurstLength", "16776192", "MaxBurstLength=1048576"),
            ("MaxBurstLength", "x", "MaxBurstLength=Reject"),
            ("FirstBurstLength", "65536", "FirstBurstLength=16384"),
            ("FirstBurstLength", "0x1000", "FirstBurstLength=4096"),
            ("InitialR2T", "No", "InitialR2T=No"),
            ("InitialR2T", "Maybe", "InitialR2T=Reject"),
            ("ImmediateData", "Yes", "ImmediateData=Yes"),
            ("DataPDUInOrder", "No", "DataPDUInOrder=Yes"),
            ("DataSequenceInOrder", "Yes", "DataSequenceInOrder=Yes"),
            ("MaxConnections", "8", "MaxConnections=1"),
            ("MaxOutstandingR2T", "0", "MaxOutstandingR2T=Reject"),
            ("ErrorRecoveryLevel", "2", "ErrorRecoveryLevel=0"),
            ("DefaultTime2Wait", "2", "DefaultTime2Wait=2"),
            ("DefaultTime2Retain", "20", "DefaultTime2Retain=0"),
            ("iSCSIProtocolLevel", "2", "iSCSIProtocolLevel=1"),
            ("TaskReporting", "FastAbort,RFC3720", "TaskReporting=RFC3720"),
            ("IFMarker", "Yes", "IFMarker=No"),
            ("OFMarkInt", "2048~65535", "OFMarkInt=Irrelevant"),
        ];
        for (key, value, answer) in table {
            assert_eq!(ask(&mut agreed, key, value), answer);
        }
        let expected = Agreed {
            header_digest: true,
            data_digest: false,
            send_segment: 262_144,
            max_burst: 1 << 20,
            said_first_burst: Some(4096),
            initial_r2t: false,
            immediate_data: true,
        };
        assert_eq!(agreed, expected);
        assert!(!agreed.negotiate("X-com.example.key", "1", 16384, &mut Vec::new()));
    }

    #[test]
    fn who_may_send_more_unasked_has_fewer_commands() {
        let window = |keys: &[(&str, &str)]| {
            let mut agreed = Agreed::new();
            keys.iter().for_each(|(key, value)| drop(ask(&mut agreed, key, value)));
            agreed.window(16384, 64)
        };
        // The defaults allow 64 KiB with each command.
        assert_eq!(window(&[]), 16);
        assert_eq!(window(&[("ImmediateData", "No")]), 64);
        assert_eq!(window(&[("ImmediateData", "No"), ("InitialR2T", "No")]), 16);
        for first_burst in ["65536", "512"] {
            assert_eq!(window(&[("FirstBurstLength", first_burst)]), 64);
        }
        assert_eq!(Agreed::new().window(512, 64), 1);
    }
}
