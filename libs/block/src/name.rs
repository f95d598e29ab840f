//! Names of volumes, replicas and snapshots.

use thiserror::Error;

/// Longest name in bytes: with the prefixes and suffixes of layer files it stays far below NAME_MAX (255).
const NAME_MAX: usize = 64;

/// Longest name of a replica or of another process of a volume, which is the volume's name and a suffix:
/// `VOLUME-r-0a1b2c3d` has 11 bytes more.
pub const PROCESS_NAME_MAX: usize = 80;

/// Why a name was refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{what} name {name:?} is not allowed: use 1 to {max} letters, digits, '.', '_' or '-', beginning with a letter or digit"
)]
pub struct NameError {
    /// "volume", "snapshot", ...
    pub what: &'static str,
    /// The refused name, shortened to what fits a line.
    pub name: String,
    /// Most bytes allowed.
    pub max: usize,
}

/// Checks a name against `^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`, at most 64 characters. `what` says in the error what it names.
///
/// # Errors
/// [`NameError`] for anything else, so also for names that would leave a directory.
pub fn check_name(what: &'static str, name: &str) -> Result<(), NameError> {
    check(what, name, NAME_MAX)
}

/// Checks the name of a replica or another process: as [`check_name`], but at most [`PROCESS_NAME_MAX`] characters.
///
/// # Errors
/// As [`check_name`].
pub fn check_process_name(what: &'static str, name: &str) -> Result<(), NameError> {
    check(what, name, PROCESS_NAME_MAX)
}

fn check(what: &'static str, name: &str, max: usize) -> Result<(), NameError> {
    let bytes = name.as_bytes();
    let starts_well = bytes.first().is_some_and(u8::is_ascii_alphanumeric);
    let goes_on_well = bytes.iter().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(b));
    if starts_well && goes_on_well && bytes.len() <= max {
        return Ok(());
    }
    Err(NameError { what, name: name.chars().take(80).collect(), max })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        for good in ["demo", "pvc-1234", "a", "A.b_c-d", &"x".repeat(64)] {
            assert!(check_name("volume", good).is_ok(), "{good}");
        }
        for bad in ["", "-a", ".", "..", "a/b", "a b", "ä", "a\n", &"x".repeat(65)] {
            assert!(check_name("volume", bad).is_err(), "{bad}");
        }
        assert!(check_process_name("replica", &format!("{}-r-0a1b2c3d", "x".repeat(64))).is_ok());
        assert!(check_process_name("replica", &"x".repeat(81)).is_err());
    }
}
