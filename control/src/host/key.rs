//! A volume's key, by which engine and replicas know each other, and what follows from it. It lies beside the record, and in no replica's
//! directory; only the host's root may read it.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::Root;
use super::durable::replace_file;
use super::record::{RecordError, VolumeRecord, damaged, io_at};
use crate::random;

/// Bytes of a volume's key.
pub(super) const KEY_LEN: usize = 32;

impl VolumeRecord {
    /// Makes the volume's key, another one than any before.
    pub(super) fn make_key(&self, root: &Root) -> Result<(), RecordError> {
        let path = root.key(&self.name);
        let key = random::bytes::<KEY_LEN>().map_err(io_at(path.clone()))?;
        replace_file(&path, &key).map_err(io_at(path))
    }

    /// Makes a key that is lost or damaged anew; true if it was. The caller holds the volume's lock, and no process of the
    /// volume runs: the key is in no replica's directory, so nobody has the one before.
    ///
    /// # Errors
    /// Others may read the key, or a file cannot be read or written.
    pub fn mend_key(&self, root: &Root) -> Result<bool, RecordError> {
        match read_key(&root.key(&self.name)) {
            Ok(_) => Ok(false),
            Err(RecordError::NoKey { .. } | RecordError::Damaged { .. }) => {
                self.make_key(root).map(|()| true)
            }
            Err(e) => Err(e),
        }
    }
}

/// The key in a volume's key file.
///
/// # Errors
/// It cannot be read, is not 32 bytes long, or others may read it.
pub fn read_key(path: &Path) -> Result<[u8; KEY_LEN], RecordError> {
    let bytes = match fs::read(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(RecordError::NoKey { path: path.to_owned() });
        }
        bytes => bytes.map_err(io_at(path.to_owned()))?,
    };
    let mode = fs::metadata(path).map_err(io_at(path.to_owned()))?.mode();
    if mode & 0o077 != 0 {
        return Err(RecordError::OpenKey { path: path.to_owned(), mode: mode & 0o777 });
    }
    let len = bytes.len();
    bytes.try_into().map_err(|_| damaged(path, &format!("a key has {KEY_LEN} bytes, not {len}")))
}

/// What proves to a volume's replicas that one may ask where its snapshots hold data, and nothing beyond that: the
/// volume's key does not follow from it. As text it is hex digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapKey(pub [u8; KEY_LEN]);

impl MapKey {
    /// That of a volume with this key.
    pub fn of(key: &[u8; KEY_LEN]) -> Self {
        Self(Sha256::new().chain_update(b"longhorn map 1").chain_update(key).finalize().into())
    }

    /// The opposite of its text.
    pub fn parse(text: &str) -> Option<Self> {
        let digit = |c: u8| char::from(c).to_digit(16);
        let mut key = [0; KEY_LEN];
        if text.len() != 2 * key.len() {
            return None;
        }
        for (byte, pair) in key.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok()?;
        }
        Some(Self(key))
    }
}

impl std::fmt::Display for MapKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&random::hex(&self.0))
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_map_key_is_not_the_key_and_comes_back_from_its_text() {
        let key = MapKey::of(&[7; KEY_LEN]);
        assert_ne!(key.0, [7; KEY_LEN]);
        assert_ne!(key, MapKey::of(&[8; KEY_LEN]));
        let text = key.to_string();
        assert_eq!(MapKey::parse(&text), Some(key));
        for wrong in ["", &text[1..], &text[2..], &format!("{text}00"), &text.replace(&text[..1], "g")] {
            assert_eq!(MapKey::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn a_key_is_made_anew_if_it_is_lost_but_not_if_others_know_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let mut record = VolumeRecord::new("demo", 1 << 30);
        record.add_replica(&root).unwrap();
        record.create(&root).unwrap();
        let path = root.key(&record.name);
        let first = read_key(&path).unwrap();
        assert!(!record.mend_key(&root).unwrap());
        assert_eq!(read_key(&path).unwrap(), first);
        fs::remove_file(&path).unwrap();
        assert!(record.mend_key(&root).unwrap());
        assert_ne!(read_key(&path).unwrap(), first);
        fs::write(&path, "short").unwrap();
        assert!(record.mend_key(&root).unwrap());
        let known = read_key(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let refused = record.mend_key(&root).unwrap_err();
        assert!(matches!(refused, RecordError::OpenKey { mode: 0o644, .. }), "{refused}");
        assert_eq!(fs::read(&path).unwrap(), known);
    }

    #[test]
    fn a_key_that_is_not_there_is_named_with_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let refused = read_key(&dir.path().join("key")).unwrap_err();
        assert!(matches!(refused, RecordError::NoKey { .. }), "{refused}");
        assert!(refused.to_string().contains("--key-file"), "{refused}");
    }

    #[test]
    fn a_key_that_others_may_read_is_no_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        fs::write(&path, [1; 32]).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        assert!(read_key(&path).is_err());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read_key(&path).unwrap(), [1; 32]);
        fs::write(&path, [1; 31]).unwrap();
        assert!(read_key(&path).is_err());
    }
}
