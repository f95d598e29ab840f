//! Longhorn's `volume-snap-NAME.img.checksum`: one line of JSON, written as Longhorn writes it.

use lh_block::rfc3339;
use serde::Deserialize;

use super::super::gojson::Object;
use super::super::meta::{META_MAX, snapshot_file};

/// The only method that Longhorn has: crc64 of the whole file, holes as zeroes.
const METHOD: &str = "crc64";

/// Name of the checksum beside a snapshot's file.
pub(in super::super) fn file_name(snapshot: &str) -> String {
    format!("{}.checksum", snapshot_file(snapshot))
}

/// Content of the file.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(in super::super) struct Recorded {
    #[serde(default)]
    method: String,
    /// 16 hex digits.
    #[serde(default)]
    checksum: String,
    /// ctime of the snapshot's file when it was hashed, as Go's `time.String()` writes it.
    #[serde(default)]
    change_time: String,
    /// RFC 3339.
    #[serde(default)]
    last_hashed_at: String,
    #[serde(default)]
    pub(in super::super) silently_corrupted: bool,
}

impl Recorded {
    pub(in super::super) fn new(checksum: u64, ctime: (i64, i64), hashed_at: String) -> Self {
        Self {
            method: METHOD.into(),
            checksum: format!("{checksum:016x}"),
            change_time: change_time(ctime, 0, "+0000 UTC"),
            last_hashed_at: hashed_at,
            silently_corrupted: false,
        }
    }

    /// `None` for what is no such file: it says nothing, and is written anew.
    pub(in super::super) fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() > META_MAX { None } else { serde_json::from_slice(bytes).ok() }
    }

    pub(in super::super) fn encode(&self) -> Vec<u8> {
        Object::new()
            .string("method", &self.method)
            .string("checksum", &self.checksum)
            .string("change_time", &self.change_time)
            .string("last_hashed_at", &self.last_hashed_at)
            .boolean("silently_corrupted", self.silently_corrupted)
            .finish()
    }

    /// The checksum, if it is of a file with this ctime.
    pub(in super::super) fn of(&self, ctime: (i64, i64)) -> Option<u64> {
        if self.method != METHOD || self.checksum.len() != 16 || !self.is_of_time(ctime) {
            return None;
        }
        u64::from_str_radix(&self.checksum, 16).ok()
    }

    /// Longhorn writes the time in its process's time zone: "2026-11-20 06:04:38.395006739 +0000 UTC".
    fn is_of_time(&self, ctime: (i64, i64)) -> bool {
        let mut words = self.change_time.splitn(3, ' ').skip(2);
        let Some(zone) = words.next() else { return false };
        let Some(offset) = zone.split(' ').next().and_then(seconds_east) else { return false };
        change_time(ctime, offset, zone) == self.change_time
    }
}

/// Seconds of a zone like "+0530".
fn seconds_east(zone: &str) -> Option<i64> {
    let (sign, digits) = match zone.split_at_checked(1)? {
        ("+", digits) => (1, digits),
        ("-", digits) => (-1, digits),
        _ => return None,
    };
    let number: u16 = digits.parse().ok().filter(|_| digits.len() == 4)?;
    Some(sign * (i64::from(number / 100) * 3600 + i64::from(number % 100) * 60))
}

/// A ctime (seconds, nanoseconds) as Go's `time.String()` has it: without zeroes at the end of the fraction.
fn change_time((seconds, nanos): (i64, i64), east: i64, zone: &str) -> String {
    let local = u64::try_from(seconds.saturating_add(east)).unwrap_or(0);
    let time = rfc3339(local).replace('T', " ");
    let time = time.trim_end_matches('Z');
    let fraction = format!("{nanos:09}");
    match fraction.trim_end_matches('0') {
        "" => format!("{time} {zone}"),
        fraction => format!("{time}.{fraction} {zone}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "{\"method\":\"crc64\",\"checksum\":\"0fac3a8982c29d39\",\
        \"change_time\":\"2026-11-20 06:04:38.395006739 +0000 UTC\",\
        \"last_hashed_at\":\"2026-11-20T06:04:40Z\",\"silently_corrupted\":false}\n";
    const TIME: (i64, i64) = (1_795_154_678, 395_006_739);

    #[test]
    fn longhorns_bytes_come_back() {
        let recorded = Recorded::parse(FILE.as_bytes()).unwrap();
        assert_eq!(recorded.of(TIME), Some(0x0fac_3a89_82c2_9d39));
        assert_eq!(recorded.encode(), FILE.as_bytes());
        let made = Recorded::new(0x0fac_3a89_82c2_9d39, TIME, "2026-11-20T06:04:40Z".into());
        assert_eq!(made.encode(), FILE.as_bytes());
    }

    #[test]
    fn it_says_nothing_of_a_file_of_another_time() {
        let recorded = Recorded::parse(FILE.as_bytes()).unwrap();
        assert_eq!(recorded.of((TIME.0, TIME.1 + 1)), None);
        assert_eq!(recorded.of((TIME.0 + 1, TIME.1)), None);
        let other = |from: &str, to: &str| Recorded::parse(FILE.replace(from, to).as_bytes()).unwrap();
        assert_eq!(other("crc64", "sha512").of(TIME), None);
        assert_eq!(other("0fac", "").of(TIME), None);
        assert_eq!(other("2026-11-20 06:04:38.395006739 +0000 UTC", "yesterday").of(TIME), None);
        assert_eq!(other("2026-11-20 06:04:38.395006739 +0000 UTC", "").of(TIME), None);
        assert!(Recorded::parse(b"{").is_none());
        assert!(Recorded::parse(&vec![b' '; META_MAX + 1]).is_none());
    }

    #[test]
    fn times_are_as_go_writes_them() {
        assert_eq!(change_time((0, 0), 0, "+0000 UTC"), "1970-01-01 00:00:00 +0000 UTC");
        assert_eq!(change_time((0, 500_000_000), 0, "+0000 UTC"), "1970-01-01 00:00:00.5 +0000 UTC");
        assert_eq!(change_time((0, 10), 0, "+0000 UTC"), "1970-01-01 00:00:00.00000001 +0000 UTC");
        // A Longhorn process with another time zone.
        let india = FILE.replace("06:04:38.395006739 +0000 UTC", "11:34:38.395006739 +0530 IST");
        assert!(Recorded::parse(india.as_bytes()).unwrap().of(TIME).is_some());
        let west = FILE.replace("06:04:38.395006739 +0000 UTC", "01:04:38.395006739 -0500 EST");
        assert!(Recorded::parse(west.as_bytes()).unwrap().of(TIME).is_some());
    }
}
