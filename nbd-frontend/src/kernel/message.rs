//! Netlink messages to the kernel's NBD client, made and read without I/O (include/uapi/linux/netlink.h, genetlink.h,
//! nbd-netlink.h). Numbers are in this machine's own order, everything begins at a multiple of 4.

/// The messages' numbers.
pub(super) mod number {
    /// Attribute of a family's name (CTRL_ATTR_FAMILY_NAME).
    pub(in super::super) const FAMILY_NAME: u16 = 2;
    /// Attribute of a family's number (CTRL_ATTR_FAMILY_ID).
    pub(in super::super) const FAMILY_ID: u16 = 1;
    /// The family that names families (GENL_ID_CTRL).
    pub(in super::super) const CONTROL_FAMILY: u16 = 0x10;
    /// CTRL_CMD_GETFAMILY.
    pub(in super::super) const GET_FAMILY: u8 = 3;

    /// NBD_CMD_CONNECT.
    pub(in super::super) const CONNECT: u8 = 1;
    /// NBD_CMD_DISCONNECT.
    pub(in super::super) const DISCONNECT: u8 = 2;
    /// NBD_CMD_RECONFIGURE.
    pub(in super::super) const RECONFIGURE: u8 = 3;
    /// NBD_CMD_STATUS.
    pub(in super::super) const STATUS: u8 = 5;

    /// NBD_ATTR_INDEX, 32 bits.
    pub(in super::super) const INDEX: u16 = 1;
    /// NBD_ATTR_SIZE_BYTES, 64 bits.
    pub(in super::super) const SIZE: u16 = 2;
    /// NBD_ATTR_BLOCK_SIZE_BYTES, 64 bits.
    pub(in super::super) const BLOCK_SIZE: u16 = 3;
    /// NBD_ATTR_TIMEOUT, seconds in 64 bits.
    pub(in super::super) const TIMEOUT: u16 = 4;
    /// NBD_ATTR_SERVER_FLAGS: the protocol's transmission flags, 64 bits.
    pub(in super::super) const SERVER_FLAGS: u16 = 5;
    /// NBD_ATTR_SOCKETS: a list of `SOCKET`.
    pub(in super::super) const SOCKETS: u16 = 7;
    /// NBD_ATTR_DEAD_CONN_TIMEOUT, seconds in 64 bits.
    pub(in super::super) const DEAD_TIMEOUT: u16 = 8;
    /// NBD_ATTR_DEVICE_LIST: a list of `DEVICE`.
    pub(in super::super) const DEVICES: u16 = 9;
    /// NBD_ATTR_BACKEND_IDENTIFIER, a string.
    pub(in super::super) const BACKEND: u16 = 10;

    /// NBD_SOCK_ITEM.
    pub(in super::super) const SOCKET: u16 = 1;
    /// NBD_SOCK_FD, 32 bits.
    pub(in super::super) const SOCKET_FD: u16 = 1;
    /// NBD_DEVICE_ITEM.
    pub(in super::super) const DEVICE: u16 = 1;
    /// NBD_DEVICE_INDEX, 32 bits.
    pub(in super::super) const DEVICE_INDEX: u16 = 1;
    /// NBD_DEVICE_CONNECTED, 8 bits.
    pub(in super::super) const DEVICE_CONNECTED: u16 = 2;
}

/// struct nlmsghdr: length, type, flags, sequence, port.
const HEAD: usize = 16;
/// struct genlmsghdr: command, version, reserved.
const COMMAND: usize = 4;
/// struct nlattr: length, type.
const ATTRIBUTE: usize = 4;

/// NLM_F_REQUEST | NLM_F_ACK.
const FLAGS: u16 = 1 | 4;
/// NLMSG_ERROR: the end of a conversation, with 0 or an errno.
const ERROR: u16 = 2;
/// NLA_F_NESTED.
const NESTED: u16 = 1 << 15;
/// Bits of an attribute's type that are no flags.
const TYPE: u16 = 0x3fff;

/// A request that is being made.
pub(super) struct Request(Vec<u8>);

impl Request {
    /// A request to a family.
    pub(super) fn new(family: u16, command: u8, sequence: u32) -> Self {
        let mut bytes = vec![0; HEAD + COMMAND];
        bytes[4..6].copy_from_slice(&family.to_ne_bytes());
        bytes[6..8].copy_from_slice(&FLAGS.to_ne_bytes());
        bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        bytes[HEAD] = command;
        bytes[HEAD + 1] = 1;
        Self(bytes)
    }

    /// Appends an attribute.
    pub(super) fn attribute(&mut self, kind: u16, value: &[u8]) {
        let len = u16::try_from(ATTRIBUTE + value.len()).expect("attributes here are short");
        self.0.extend_from_slice(&len.to_ne_bytes());
        self.0.extend_from_slice(&kind.to_ne_bytes());
        self.0.extend_from_slice(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
    }

    /// Appends an attribute of 64 bits.
    pub(super) fn number(&mut self, kind: u16, value: u64) {
        self.attribute(kind, &value.to_ne_bytes());
    }

    /// Appends a string.
    pub(super) fn text(&mut self, kind: u16, value: &str) {
        self.attribute(kind, &[value.as_bytes(), &[0]].concat());
    }

    /// Appends an attribute made of others.
    pub(super) fn nested(&mut self, kind: u16, fill: impl FnOnce(&mut Self)) {
        let at = self.0.len();
        self.attribute(kind | NESTED, &[]);
        fill(self);
        let len = u16::try_from(self.0.len() - at).expect("attributes here are short");
        self.0[at..at + 2].copy_from_slice(&len.to_ne_bytes());
    }

    /// What is sent.
    pub(super) fn finish(mut self) -> Vec<u8> {
        let len = u32::try_from(self.0.len()).expect("requests are short");
        self.0[..4].copy_from_slice(&len.to_ne_bytes());
        self.0
    }
}

/// A message of the kernel's.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Reply<'a> {
    /// The conversation with this number has ended: well, or with an errno.
    End(u32, Result<(), i32>),
    /// Attributes.
    Data(u32, &'a [u8]),
}

/// Takes the messages of a datagram apart; ends at the first that is cut short.
pub(super) fn replies(mut bytes: &[u8]) -> impl Iterator<Item = Reply<'_>> {
    std::iter::from_fn(move || {
        let len = usize::try_from(u32_at(bytes, 0)?).ok()?;
        let message = bytes.get(..len).filter(|message| message.len() >= HEAD)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        let sequence = u32_at(message, 8)?;
        if u16_at(message, 4)? == ERROR {
            let code = u32_at(message, HEAD)?.cast_signed();
            // Some kernels acknowledge with a count.
            let result = if code >= 0 { Ok(()) } else { Err(-code) };
            return Some(Reply::End(sequence, result));
        }
        Some(Reply::Data(sequence, message.get(HEAD + COMMAND..)?))
    })
}

/// The attributes in some bytes: kind and value; ends at the first that is cut short.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)? & TYPE;
        let value = bytes.get(ATTRIBUTE..len)?;
        bytes = bytes.get(len.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// The value of the first attribute of this kind.
pub(super) fn find(bytes: &[u8], kind: u16) -> Option<&[u8]> {
    attributes(bytes).find(|(k, _)| *k == kind).map(|(_, value)| value)
}

pub(super) fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn little(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect::<Vec<_>>().join(" ")
    }

    /// Worked out by hand from the kernel's headers, for two sockets.
    #[cfg(target_endian = "little")]
    #[test]
    fn a_connect_is_these_bytes() {
        let mut request = Request::new(0x1d, number::CONNECT, 7);
        request.number(number::SIZE, 1 << 20);
        request.nested(number::SOCKETS, |list| {
            for fd in [3_u32, 4] {
                list.nested(number::SOCKET, |item| item.attribute(number::SOCKET_FD, &fd.to_ne_bytes()));
            }
        });
        let bytes = request.finish();
        assert_eq!(little(&bytes[..20]), "3c 00 00 00 1d 00 05 00 07 00 00 00 00 00 00 00 01 01 00 00");
        assert_eq!(little(&bytes[20..32]), "0c 00 02 00 00 00 10 00 00 00 00 00");
        assert_eq!(little(&bytes[32..52]), "1c 00 07 80 0c 00 01 80 08 00 01 00 03 00 00 00 0c 00 01 80");
        assert_eq!(bytes.len(), 0x3c);
    }

    #[test]
    fn answers_are_read_back() {
        let mut request = Request::new(0x1d, number::STATUS, 9);
        request.nested(number::DEVICES, |list| {
            list.nested(number::DEVICE, |item| {
                item.attribute(number::DEVICE_INDEX, &5_u32.to_ne_bytes());
                item.attribute(number::DEVICE_CONNECTED, &[1]);
            });
        });
        let bytes = request.finish();
        let Some(Reply::Data(9, data)) = replies(&bytes).next() else { panic!("no data") };
        let list = find(data, number::DEVICES).unwrap();
        let device = find(list, number::DEVICE).unwrap();
        assert_eq!(find(device, number::DEVICE_INDEX), Some(&5_u32.to_ne_bytes()[..]));
        assert_eq!(find(device, number::DEVICE_CONNECTED), Some(&[1][..]));
        assert_eq!(find(device, 7), None);
    }

    #[test]
    fn an_end_tells_how_it_went() {
        let end = |code: i32| {
            let head = [20_u32.to_ne_bytes(), [2, 0, 0, 0], 3_u32.to_ne_bytes(), [0; 4]];
            let head =
                if cfg!(target_endian = "big") { [head[0], [0, 2, 0, 0], head[2], head[3]] } else { head };
            [head.concat(), code.to_ne_bytes().to_vec()].concat()
        };
        assert_eq!(replies(&end(0)).next(), Some(Reply::End(3, Ok(()))));
        assert_eq!(replies(&end(2)).next(), Some(Reply::End(3, Ok(()))));
        assert_eq!(replies(&end(-16)).next(), Some(Reply::End(3, Err(16))));
    }

    #[test]
    fn what_is_cut_short_is_not_read() {
        let mut request = Request::new(1, 1, 1);
        request.text(number::BACKEND, "volume");
        let bytes = request.finish();
        for len in 0..bytes.len() {
            assert_eq!(replies(&bytes[..len]).next(), None, "{len}");
        }
        let attribute = &bytes[20..];
        assert_eq!(attributes(attribute).next(), Some((10, &b"volume\0"[..])));
        for len in 0..11 {
            assert_eq!(attributes(&attribute[..len]).next(), None, "{len}");
        }
        // Lengths that would never end.
        assert_eq!(replies(&[0; 64]).count(), 0);
        assert_eq!(attributes(&[0; 64]).count(), 0);
    }
}
