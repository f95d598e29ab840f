//! INQUIRY: who the unit is and what it can do (SPC-4, 6.6 and 7.8; SBC-3, 6.6).

use std::borrow::Cow;

use lh_block::Geometry;

use super::command::{COMMANDS, Cdb, be16};
use super::sense::{INVALID_FIELD, Sense};
use super::work::{COMPARE_WRITE_BYTES, TRANSFER_MAX, WRITE_SAME_BLOCKS};

/// PERIPHERAL QUALIFIER and DEVICE TYPE (SPC-4, 6.6.2).
mod peripheral {
    /// Direct access block device.
    pub(super) const DISK: u8 = 0x00;
    /// Storage array controller device: logical unit 0, which has no medium.
    pub(super) const CONTROLLER: u8 = 0x0c;
    /// No logical unit here, nor can there be one.
    pub(super) const NONE: u8 = 0x7f;
}

/// EVPD of an INQUIRY CDB (SPC-4, 6.6.1).
const EVPD: u8 = 0x01;

/// VERSION: SPC-3, which all initiators know how to treat (SPC-4, table 142).
const VERSION: u8 = 0x05;

/// VERSION DESCRIPTORs: SAM-3, SPC-3, SBC-3, iSCSI, without a version of theirs (SPC-4, table 145).
const VERSION_DESCRIPTORS: [u16; 4] = [0x0060, 0x0300, 0x04c0, 0x0960];

/// Bytes of standard INQUIRY data, the version descriptors included.
const STANDARD_LEN: usize = 74;

/// Vital product data pages (SPC-4, table 535; SBC-3, table 230).
pub mod vpd {
    /// Supported VPD pages.
    pub const SUPPORTED: u8 = 0x00;
    /// Unit serial number.
    pub const SERIAL: u8 = 0x80;
    /// Device identification.
    pub const IDENTIFICATION: u8 = 0x83;
    /// Block limits.
    pub const BLOCK_LIMITS: u8 = 0xb0;
    /// Block device characteristics.
    pub const CHARACTERISTICS: u8 = 0xb1;
    /// Logical block provisioning.
    pub const PROVISIONING: u8 = 0xb2;
}

const PAGES: [u8; 6] = [
    vpd::SUPPORTED,
    vpd::SERIAL,
    vpd::IDENTIFICATION,
    vpd::BLOCK_LIMITS,
    vpd::CHARACTERISTICS,
    vpd::PROVISIONING,
];

/// Most descriptors in one UNMAP: as many as its parameter list can hold.
pub(crate) const UNMAP_DESCRIPTORS_MAX: u32 = (65535 - 8) / 16;

/// Who a logical unit is: what an initiator knows it again by. ASCII.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// T10 VENDOR IDENTIFICATION, at most 8 characters.
    pub vendor: String,
    /// PRODUCT IDENTIFICATION, at most 16 characters.
    pub product: String,
    /// PRODUCT REVISION LEVEL, at most 4 characters.
    pub revision: String,
    /// Unit serial number: the same as long as the volume lives, and of no other volume.
    pub serial: String,
}

impl Identity {
    /// Most characters of a serial number: with them every page stays below 256 bytes.
    pub const SERIAL_MAX: usize = 128;

    /// The identity of a volume, from its name.
    pub fn of_volume(name: &str) -> Self {
        let mut serial: String = name.chars().filter(char::is_ascii_graphic).collect();
        serial.truncate(Self::SERIAL_MAX);
        Self { vendor: "LONGHORN".into(), product: "VIRTUAL-DISK".into(), revision: "0001".into(), serial }
    }

    /// A locally assigned NAA identifier (SPC-4, 7.8.6.6.3): 60 bits that follow from the serial number. Initiators take
    /// two disks with the same one for two ways to one disk.
    fn naa(&self) -> u64 {
        let hash = lh_block::fnv1a(self.serial.bytes());
        0x3 << 60 | (hash ^ hash >> 60) & 0x0fff_ffff_ffff_ffff
    }

    /// The same of logical unit 0: each unit has identifiers of its own (SPC-4, 7.8.6.2.1). No volume's name has a comma.
    fn of_controller(&self) -> Self {
        Self { serial: format!("{},0", self.serial), ..self.clone() }
    }
}

/// Which logical unit was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The disk.
    Disk,
    /// Logical unit 0.
    Controller,
    /// A number that no unit has.
    Nowhere,
}

fn padded(text: &str, len: usize, to: &mut Vec<u8>) {
    let bytes = text.as_bytes();
    let taken = bytes.len().min(len);
    to.extend_from_slice(&bytes[..taken]);
    to.resize(to.len() + len - taken, b' ');
}

/// Answers INQUIRY: fills `reply`, which is empty, up to the allocation length.
///
/// # Errors
/// INVALID FIELD IN CDB for a page that is not there.
pub(crate) fn inquiry(
    cdb: &Cdb,
    place: Place,
    identity: &Identity,
    geometry: &Geometry,
    reply: &mut Vec<u8>,
) -> Result<(), Sense> {
    let device = match place {
        Place::Disk => peripheral::DISK,
        Place::Controller => peripheral::CONTROLLER,
        Place::Nowhere => peripheral::NONE,
    };
    let page = cdb[2];
    if cdb[1] & EVPD == 0 {
        if page != 0 {
            return Err(INVALID_FIELD.at_cdb(2));
        }
        standard(device, identity, reply);
    } else {
        let known = if place == Place::Disk { &PAGES[..] } else { &PAGES[..3] };
        if !known.contains(&page) || place == Place::Nowhere {
            return Err(INVALID_FIELD.at_cdb(2));
        }
        let identity = match place {
            Place::Controller => Cow::Owned(identity.of_controller()),
            Place::Disk | Place::Nowhere => Cow::Borrowed(identity),
        };
        reply.extend_from_slice(&[device, page, 0, 0]);
        vital(page, known, &identity, geometry, reply);
        let len = u16::try_from(reply.len() - 4).unwrap_or(u16::MAX);
        reply[2..4].copy_from_slice(&len.to_be_bytes());
    }
    reply.truncate(usize::from(be16(cdb, 3)));
    Ok(())
}

/// Standard INQUIRY data (SPC-4, 6.6.2).
fn standard(device: u8, identity: &Identity, reply: &mut Vec<u8>) {
    // HISUP: logical units are told as SAM says. RESPONSE DATA FORMAT 2. CMDQUE: commands are queued.
    reply.extend_from_slice(&[device, 0, VERSION, 0x12, 0, 0, 0, 0x02]);
    padded(&identity.vendor, 8, reply);
    padded(&identity.product, 16, reply);
    padded(&identity.revision, 4, reply);
    reply.resize(58, 0);
    VERSION_DESCRIPTORS.iter().for_each(|descriptor| reply.extend_from_slice(&descriptor.to_be_bytes()));
    reply.resize(STANDARD_LEN, 0);
    // ADDITIONAL LENGTH counts what follows it.
    reply[4] = u8::try_from(STANDARD_LEN - 5).unwrap_or(0);
}

const _: () = assert!(STANDARD_LEN < 256 && 58 + 2 * VERSION_DESCRIPTORS.len() <= STANDARD_LEN);

fn vital(page: u8, known: &[u8], identity: &Identity, geometry: &Geometry, reply: &mut Vec<u8>) {
    match page {
        vpd::SUPPORTED => reply.extend_from_slice(known),
        vpd::SERIAL => reply.extend_from_slice(identity.serial.as_bytes()),
        vpd::IDENTIFICATION => identification(identity, reply),
        vpd::BLOCK_LIMITS => block_limits(geometry, reply),
        vpd::CHARACTERISTICS => {
            // SBC-3, 6.6.2. MEDIUM ROTATION RATE 1: it does not rotate.
            reply.extend_from_slice(&[0, 1]);
            reply.resize(4 + 60, 0);
        }
        _ => {
            // SBC-3, 6.6.4. LBPU, LBPWS, LBPWS10; LBPRZ: what is unmapped reads as zero. PROVISIONING TYPE 2: thin.
            reply.extend_from_slice(&[0, 0xe4, 2, 0]);
        }
    }
}

/// Designators (SPC-4, 7.8.6): T10 vendor identification, NAA, relative target port.
fn identification(identity: &Identity, reply: &mut Vec<u8>) {
    // ASCII, logical unit, T10 vendor identification.
    let serial = identity.serial.as_bytes();
    reply.extend_from_slice(&[0x02, 0x01, 0, 0]);
    let at = reply.len();
    padded(&identity.vendor, 8, reply);
    reply.extend_from_slice(serial);
    reply[at - 1] = u8::try_from(reply.len() - at).unwrap_or(u8::MAX);
    // Binary, logical unit, NAA.
    reply.extend_from_slice(&[0x01, 0x03, 0, 8]);
    reply.extend_from_slice(&identity.naa().to_be_bytes());
    // Binary, target port, PIV with the protocol iSCSI (5), relative target port 1.
    reply.extend_from_slice(&[0x51, 0x94, 0, 4, 0, 0, 0, 1]);
}

/// The block limits page (SBC-3, 6.6.3).
fn block_limits(geometry: &Geometry, reply: &mut Vec<u8>) {
    let block = geometry.logical_block;
    let per_physical = geometry.physical_block / block;
    let most = geometry.max_transfer.min(TRANSFER_MAX);
    let (transfer, compared) = (most / block, COMPARE_WRITE_BYTES.min(most / 2) / block);
    // WSNZ = 0: a WRITE SAME of 0 blocks goes to the end.
    reply.push(0);
    // MAXIMUM COMPARE AND WRITE LENGTH.
    reply.push(u8::try_from(compared).unwrap_or(u8::MAX));
    // OPTIMAL TRANSFER LENGTH GRANULARITY: what is smaller is widened by the engine.
    reply.extend_from_slice(&u16::try_from(per_physical).unwrap_or(0).to_be_bytes());
    // MAXIMUM TRANSFER LENGTH, OPTIMAL TRANSFER LENGTH, MAXIMUM PREFETCH LENGTH (no limit).
    for n in [transfer, transfer, 0] {
        reply.extend_from_slice(&n.to_be_bytes());
    }
    // MAXIMUM UNMAP LBA COUNT (no limit), MAXIMUM UNMAP BLOCK DESCRIPTOR COUNT, OPTIMAL UNMAP GRANULARITY,
    // UGAVALID with UNMAP GRANULARITY ALIGNMENT 0.
    for n in [u32::MAX, UNMAP_DESCRIPTORS_MAX, per_physical, 1 << 31] {
        reply.extend_from_slice(&n.to_be_bytes());
    }
    // MAXIMUM WRITE SAME LENGTH.
    reply.extend_from_slice(&u64::from(WRITE_SAME_BLOCKS).to_be_bytes());
    reply.resize(4 + 60, 0);
}

/// Answers REPORT SUPPORTED OPERATION CODES (SPC-4, 6.35).
///
/// # Errors
/// INVALID FIELD IN CDB for reporting options that contradict the command, or are unknown.
pub(crate) fn report_opcodes(cdb: &Cdb, reply: &mut Vec<u8>) -> Result<(), Sense> {
    let timeouts = cdb[2] & 0x80 != 0;
    let (opcode, action) = (cdb[3], be16(cdb, 4));
    match cdb[2] & 0x07 {
        0 => {
            reply.extend_from_slice(&[0; 4]);
            for row in COMMANDS {
                let flags = u8::from(row.action.is_some()) | u8::from(timeouts) << 1;
                let length = u8::try_from(row.usage.len()).unwrap_or(0);
                let action = row.action.unwrap_or(0);
                reply.extend_from_slice(&[row.opcode, 0, 0, action, 0, flags, 0, length]);
                push_timeouts(timeouts, reply);
            }
            let len = u32::try_from(reply.len() - 4).unwrap_or(0);
            reply[..4].copy_from_slice(&len.to_be_bytes());
        }
        option @ 1..=3 => {
            let mut rows = COMMANDS.iter().filter(|row| row.opcode == opcode).peekable();
            let with_actions = rows.peek().is_some_and(|row| row.action.is_some());
            if (option == 1 && with_actions) || (option == 2 && rows.peek().is_some() && !with_actions) {
                return Err(INVALID_FIELD.at_cdb(2));
            }
            let found = rows.find(|row| row.action.is_none_or(|own| u16::from(own) == action));
            // SUPPORT: 3 as the standard says, 1 not at all.
            let support = if found.is_some() { 3 } else { 1 };
            reply.extend_from_slice(&[0, support | u8::from(timeouts && found.is_some()) << 7, 0, 0]);
            if let Some(row) = found {
                reply[3] = u8::try_from(row.usage.len()).unwrap_or(0);
                reply.extend_from_slice(row.usage);
                push_timeouts(timeouts, reply);
            }
        }
        _ => return Err(INVALID_FIELD.at_cdb(2)),
    }
    Ok(())
}

/// A command timeouts descriptor that says nothing (SPC-4, 6.35.4): I/O waits as long as the volume is told to.
fn push_timeouts(wanted: bool, reply: &mut Vec<u8>) {
    if wanted {
        reply.extend_from_slice(&[0, 0x0a, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        size: 1 << 30,
        logical_block: 512,
        physical_block: 4096,
        max_transfer: 1 << 20,
        depth: 128,
    };

    fn ask(page: Option<u8>, allocation: u16, place: Place) -> Result<Vec<u8>, Sense> {
        let [high, low] = allocation.to_be_bytes();
        let mut cdb = [0; 16];
        cdb[..5].copy_from_slice(&[0x12, u8::from(page.is_some()), page.unwrap_or(0), high, low]);
        let mut reply = Vec::new();
        inquiry(&cdb, place, &Identity::of_volume("vol-1"), &GEOMETRY, &mut reply)?;
        Ok(reply)
    }

    #[test]
    fn standard_data_says_who_it_is_and_is_cut_to_the_allocation_length() {
        let all = ask(None, 255, Place::Disk).unwrap();
        assert_eq!((all.len(), usize::from(all[4])), (74, 69));
        assert_eq!(&all[8..36], b"LONGHORNVIRTUAL-DISK    0001");
        assert_eq!(ask(None, 5, Place::Disk).unwrap(), all[..5]);
        assert_eq!(ask(None, 255, Place::Controller).unwrap()[0], 0x0c);
        assert_eq!(ask(None, 255, Place::Nowhere).unwrap()[0], 0x7f);
    }

    #[test]
    fn every_page_of_the_list_is_there_and_says_its_length() {
        let list = ask(Some(0), 255, Place::Disk).unwrap();
        assert_eq!(list[4..], PAGES);
        for page in &list[4..] {
            let bytes = ask(Some(*page), 1024, Place::Disk).unwrap();
            assert_eq!(bytes[1], *page);
            assert_eq!(usize::from(u16::from_be_bytes([bytes[2], bytes[3]])), bytes.len() - 4);
        }
        assert_eq!(ask(Some(0xb3), 255, Place::Disk), Err(INVALID_FIELD.at_cdb(2)));
        assert_eq!(ask(Some(0xb0), 255, Place::Controller), Err(INVALID_FIELD.at_cdb(2)));
    }

    /// Who finds an identifier at two units takes them for two ways to one.
    #[test]
    fn the_controller_has_identifiers_of_its_own() {
        let identifiers = |place: Place| {
            let page = ask(Some(vpd::IDENTIFICATION), 255, place).unwrap();
            let mut found = vec![ask(Some(vpd::SERIAL), 255, place).unwrap()[4..].to_vec()];
            let mut rest = &page[4..];
            while let Some((head, behind)) = rest.split_first_chunk::<4>() {
                let (value, next) = behind.split_at(usize::from(head[3]));
                // ASSOCIATION 0: the unit's. The target port is the same.
                if head[1] & 0x30 == 0 {
                    found.push(value.to_vec());
                }
                rest = next;
            }
            found
        };
        let (disk, controller) = (identifiers(Place::Disk), identifiers(Place::Controller));
        assert_eq!((disk.len(), controller.len()), (3, 3));
        assert!(disk.iter().all(|one| !controller.contains(one)), "{disk:x?} {controller:x?}");
    }

    #[test]
    fn block_limits_follow_the_geometry() {
        let page = ask(Some(0xb0), 255, Place::Disk).unwrap();
        assert_eq!(page.len(), 64);
        assert_eq!(be16(&page, 6), 8);
        assert_eq!(u32::from_be_bytes(page[8..12].try_into().unwrap()), 2048);
        assert_eq!(u32::from_be_bytes(page[28..32].try_into().unwrap()), 8);
    }

    #[test]
    fn identifiers_are_stable_and_differ_between_volumes() {
        let naa = |name: &str| Identity::of_volume(name).naa();
        assert_eq!(naa("vol-1"), naa("vol-1"));
        assert_ne!(naa("vol-1"), naa("vol-2"));
        assert_eq!((naa("vol-1") >> 60, naa("a")), (3, 0x3f63_dc4c_8601_ec86));
        // So many that of 32 bits some two would be the same.
        let mut state = 0x2545_f491_4f6c_dd1d_u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let names = (0..200_000).map(|_| naa(&format!("pvc-{:016x}{:016x}", random(), random())));
        assert_eq!(names.collect::<std::collections::HashSet<_>>().len(), 200_000);
        assert_eq!(Identity::of_volume(&"x".repeat(500)).serial.len(), Identity::SERIAL_MAX);
    }

    #[test]
    fn opcodes_are_told_with_their_usage() {
        let mut reply = Vec::new();
        report_opcodes(&[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &mut reply).unwrap();
        assert_eq!(reply.len(), 4 + 8 * COMMANDS.len());
        reply.clear();
        report_opcodes(&[0xa3, 0x0c, 0x81, 0x28, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &mut reply).unwrap();
        assert_eq!(reply[..6], [0, 0x83, 0, 10, 0x28, 0x1a]);
        assert_eq!(reply.len(), 4 + 10 + 12);
        reply.clear();
        report_opcodes(&[0xa3, 0x0c, 1, 0x04, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], &mut reply).unwrap();
        assert_eq!(reply, [0, 1, 0, 0]);
        let one = [0xa3, 0x0c, 1, 0x9e, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        assert_eq!(report_opcodes(&one, &mut reply), Err(INVALID_FIELD.at_cdb(2)));
    }
}
