//! Which programs an instance manager starts: its own, and files below `ROOT/engine-binaries/`.
//!
//! Anything else would turn an open port into a root shell (CVE-2021-36779). A path is judged after all symbolic links
//! in it are resolved, and what was judged is what is executed.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use thiserror::Error;

/// Why a program is not started.
#[derive(Debug, Error)]
pub(super) enum ProgramError {
    /// Not one of ours.
    #[error("{binary} is not run here: only this program and files below {} are", binaries.display())]
    Foreign {
        /// What was asked for.
        binary: String,
        /// Where a program may lie.
        binaries: PathBuf,
    },
    /// Somebody else could replace it.
    #[error("{} is not run: others than its owner may write it, or it belongs to another user: chown root, chmod 755", .0.display())]
    Writable(PathBuf),
    /// Not there, or no program.
    #[error("{binary} cannot be run: {reason}")]
    Unusable {
        /// What was asked for.
        binary: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// The programs that may be run.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    own: PathBuf,
    binaries: PathBuf,
}

impl Programs {
    /// `own` is this program's path, `binaries` the directory of further ones.
    pub(super) fn new(own: PathBuf, binaries: PathBuf) -> Self {
        Self { own, binaries }
    }

    /// This program.
    pub(super) fn own(&self) -> &Path {
        &self.own
    }

    /// The path to execute for `binary`; the empty one is this program.
    pub(super) fn resolve(&self, binary: &str) -> Result<PathBuf, ProgramError> {
        let foreign = || ProgramError::Foreign { binary: binary.to_owned(), binaries: self.binaries.clone() };
        let unusable = |reason: String| ProgramError::Unusable { binary: binary.to_owned(), reason };
        // Whoever means this program need not know where it lies, nor mind when it is replaced by a newer one.
        if binary.is_empty() {
            return Ok(self.own.clone());
        }
        let asked = Path::new(binary);
        if !asked.is_absolute() {
            return Err(unusable("name it by its absolute path".to_owned()));
        }
        let resolved = match asked.canonicalize() {
            Ok(resolved) => resolved,
            // What lies outside is none of the caller's business, not even whether it exists.
            Err(e) if asked.starts_with(&self.binaries) => return Err(unusable(e.to_string())),
            Err(_) => return Err(foreign()),
        };
        if self.own.canonicalize().is_ok_and(|own| own == resolved) {
            return Ok(resolved);
        }
        let below = self.binaries.canonicalize().is_ok_and(|dir| resolved.starts_with(dir));
        if !below {
            return Err(foreign());
        }
        check_file(&resolved).map_err(|e| unusable(e.to_string()))?;
        if !is_safe(&resolved).map_err(|e| unusable(e.to_string()))? {
            return Err(ProgramError::Writable(resolved));
        }
        Ok(resolved)
    }
}

fn check_file(path: &Path) -> io::Result<()> {
    let meta = path.metadata()?;
    if !meta.is_file() || meta.mode() & 0o111 == 0 {
        return Err(io::Error::other("it is not an executable file"));
    }
    Ok(())
}

/// True if only its owner may write the file, and that is root or the user this runs as.
fn is_safe(path: &Path) -> io::Result<bool> {
    let meta = path.metadata()?;
    let ours = meta.uid() == 0 || meta.uid() == nix::unistd::geteuid().as_raw();
    Ok(ours && meta.mode() & 0o022 == 0)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    struct Place {
        dir: tempfile::TempDir,
        programs: Programs,
    }

    impl Place {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let binaries = dir.path().join("engine-binaries");
            fs::create_dir(&binaries).unwrap();
            let own = std::env::current_exe().unwrap();
            Self { programs: Programs::new(own, binaries), dir }
        }

        fn path(&self, name: &str) -> String {
            self.dir.path().join(name).to_str().unwrap().to_owned()
        }

        fn script(&self, name: &str, mode: u32) -> String {
            let path = self.path(name);
            fs::write(&path, "#!/bin/sh\n").unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
            path
        }

        fn refused(&self, binary: &str) -> ProgramError {
            self.programs.resolve(binary).expect_err(binary)
        }
    }

    #[test]
    fn own_program_and_engine_binaries_are_run() {
        let place = Place::new();
        let own = std::env::current_exe().unwrap().canonicalize().unwrap();
        assert_eq!(place.programs.resolve(own.to_str().unwrap()).unwrap(), own);
        assert_eq!(place.programs.resolve("").unwrap(), std::env::current_exe().unwrap());
        fs::create_dir(place.path("engine-binaries/v1")).unwrap();
        let script = place.script("engine-binaries/v1/longhorn", 0o755);
        assert_eq!(place.programs.resolve(&script).unwrap(), fs::canonicalize(&script).unwrap());
    }

    #[test]
    fn every_way_out_is_refused() {
        let place = Place::new();
        let outside = place.script("outside", 0o755);
        place.script("engine-binaries-not", 0o755);
        symlink("/bin/bash", place.path("engine-binaries/link")).unwrap();
        symlink("/bin", place.path("engine-binaries/dir")).unwrap();
        for binary in [
            "/bin/bash",
            "/bin/no-such-program",
            &outside,
            &place.path("engine-binaries-not"),
            &place.path("engine-binaries/../outside"),
            &place.path("engine-binaries/link"),
            &place.path("engine-binaries/dir/bash"),
            &place.path("engine-binaries/../../../../../bin/bash"),
        ] {
            assert!(matches!(place.refused(binary), ProgramError::Foreign { .. }), "{binary}");
        }
        for binary in ["bash", "./bash", "../bin/bash"] {
            assert!(matches!(place.refused(binary), ProgramError::Unusable { .. }), "{binary}");
        }
    }

    #[test]
    fn files_that_others_may_change_or_nobody_may_run_are_refused() {
        let place = Place::new();
        let open = place.script("engine-binaries/open", 0o777);
        assert!(matches!(place.refused(&open), ProgramError::Writable(_)));
        let plain = place.script("engine-binaries/plain", 0o644);
        assert!(matches!(place.refused(&plain), ProgramError::Unusable { .. }));
        assert!(matches!(place.refused(&place.path("engine-binaries")), ProgramError::Unusable { .. }));
        assert!(matches!(place.refused(&place.path("engine-binaries/none")), ProgramError::Unusable { .. }));
    }
}
