//! The random ids that tie our files to Longhorn's: each names a volume or a layer, and stands in an attribute of its file.

use std::fmt;
use std::io;

use lh_block::Instance;
use lh_ring::sys;
use serde::{Deserialize, Serialize};

/// Attribute of volume.meta: the id that our records name.
pub(super) const VOLUME_ATTRIBUTE: &str = "user.longhorn.volume";
/// Attribute of a layer's file: the id that its zero map names.
pub(super) const LAYER_ATTRIBUTE: &str = "user.longhorn.layer";

/// A random id, 32 hex digits as text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Id(Instance);

impl Id {
    pub(super) fn random() -> io::Result<Self> {
        random().map(|n| Self(Instance(n)))
    }

    pub(super) fn bytes(self) -> [u8; 16] {
        self.0.0.to_be_bytes()
    }

    /// Reads the text of an attribute or a file name.
    pub(super) fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok().filter(|t| t.len() == 32)?;
        u128::from_str_radix(text, 16).ok().map(|n| Self(Instance(n)))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0.0)
    }
}

/// Sixteen bytes that no one else has.
fn random() -> io::Result<u128> {
    let mut bytes = [0; 16];
    sys::random(&mut bytes)?;
    Ok(u128::from_le_bytes(bytes))
}
