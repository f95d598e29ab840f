//! What engine and keeper say to each other over the keeper's socket.
//!
//! A keeper outlives engines of several versions, so the messages are made to be read by any of them: lines of text, the
//! first a word, the others `key value`, an empty line at the end. Unknown keys are passed over. A request is
//! answered by one message; the answer to `attach` carries two descriptors with its first byte.
//! The table is in `docs/formats/fuse.md`.

use std::fmt::Write as _;
use std::io::{self, Read};

/// Bytes of the longest message: paths and names are far below. A peer that sends more is cut off.
const MESSAGE_MAX: usize = 8 << 10;

/// A message of either side.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Message {
    /// A request's name, or `ok` or `error`.
    pub(super) word: String,
    fields: Vec<(String, String)>,
}

impl Message {
    pub(super) fn new(word: &str) -> Self {
        Self { word: word.into(), fields: Vec::new() }
    }

    /// Adds a field. A line break in the value ends it: none of ours has one.
    pub(super) fn with(mut self, key: &str, value: impl std::fmt::Display) -> Self {
        let value = value.to_string();
        let value = value.split('\n').next().unwrap_or_default();
        self.fields.push((key.into(), value.into()));
        self
    }

    pub(super) fn with_option(self, key: &str, value: Option<impl std::fmt::Display>) -> Self {
        match value {
            Some(value) => self.with(key, value),
            None => self,
        }
    }

    pub(super) fn get(&self, key: &str) -> Option<&str> {
        self.fields.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    /// A field as a number.
    pub(super) fn number<N: std::str::FromStr>(&self, key: &str) -> Option<N> {
        self.get(key)?.parse().ok()
    }

    pub(super) fn encode(&self) -> String {
        let mut text = self.word.clone();
        for (key, value) in &self.fields {
            let _ = write!(text, "\n{key} {value}");
        }
        text.push_str("\n\n");
        text
    }

    /// Reads one message, which begins with `begin`.
    ///
    /// # Errors
    /// `UnexpectedEof` if the peer is gone, `InvalidData` for what is no message; then nothing more can be read.
    pub(super) fn read(mut from: impl Read, begin: &[u8]) -> io::Result<Self> {
        let mut bytes = begin.to_vec();
        while !bytes.ends_with(b"\n\n") {
            // Byte by byte: what follows the message belongs to the next, and these are a few hundred bytes in a life.
            let mut byte = [0];
            if bytes.len() > MESSAGE_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            from.read_exact(&mut byte)?;
            bytes.extend(byte);
        }
        let text = String::from_utf8(bytes).map_err(|_| io::ErrorKind::InvalidData)?;
        // A carriage return is a part of a value: a path may have one.
        let mut lines = text.trim_end_matches('\n').split('\n');
        let mut message = Self::new(lines.next().unwrap_or_default());
        for line in lines {
            let (key, value) = line.split_once(' ').ok_or(io::ErrorKind::InvalidData)?;
            message.fields.push((key.into(), value.into()));
        }
        Ok(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_lines_and_an_empty_one() {
        let message = Message::new("ok").with("device", "/dev/loop3").with("owner", "/var/lib/a b");
        assert_eq!(message.encode(), "ok\ndevice /dev/loop3\nowner /var/lib/a b\n\n");
        let mut stream = message.encode().into_bytes();
        stream.extend(b"rest");
        let mut from = &stream[1..];
        assert_eq!(Message::read(&mut from, b"o").unwrap(), message);
        assert_eq!(from, b"rest");
    }

    #[test]
    fn values_never_break_the_frame() {
        assert_eq!(Message::new("error").with("text", "a\n\nb").encode(), "error\ntext a\n\n");
        assert_eq!(Message::new("error").with("text", "").encode(), "error\ntext \n\n");
    }

    /// The keeper would take the root's owner for another's, and show the volume to nobody.
    #[test]
    fn a_value_comes_as_it_was_sent() {
        let message = Message::new("attach").with("owner", "/var/lib/a\r");
        assert_eq!(Message::read(message.encode().as_bytes(), b"").unwrap(), message);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let kind = |bytes: &[u8]| Message::read(bytes, b"").unwrap_err().kind();
        assert_eq!(kind(b""), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(b"attach\n"), io::ErrorKind::UnexpectedEof);
        assert_eq!(kind(b"attach\nnospace\n\n"), io::ErrorKind::InvalidData);
        assert_eq!(kind(b"\xff\n\n"), io::ErrorKind::InvalidData);
        assert_eq!(kind(&vec![b'x'; 100_000]), io::ErrorKind::InvalidData);
    }
}
