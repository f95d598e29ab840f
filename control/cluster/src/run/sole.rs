//! One manager of a root at a time, whichever cluster or namespace it is of.
//!
//! Another one would find processes of which it has no resources, and end them. Two are there for a moment while a DaemonSet is
//! rolled out with a surge, and for good where two installations were given the same directory of the node.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::time::Duration;

use control::host::Root;

use super::{Options, RunError};

/// Between two looks whether the other one has ended.
const LOOK: Duration = Duration::from_millis(500);

/// Held by the manager of a root; let go when dropped or when the process ends, however it does.
#[derive(Debug)]
pub(super) struct Sole {
    _file: File,
}

/// Returns once no other manager has the root. Cancelled it leaves nothing.
///
/// # Errors
/// [`RunError::Lock`].
pub(super) async fn sole(root: &Root, options: &Options) -> Result<Sole, RunError> {
    let path = root.cluster_manager_lock();
    let failed = |source| RunError::Lock { path: path.clone(), source };
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
    let mut file = file.map_err(failed)?;
    let mut is_told = false;
    loop {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        if !std::mem::replace(&mut is_told, true) {
            let other = holder(&path).unwrap_or_default();
            tracing::warn!(root = %root.path().display(), other, "another manager has this root: waiting until it ends");
        }
        tokio::time::sleep(LOOK).await;
    }
    let said = format!("node {}, namespace {}\n", options.node, options.namespace);
    file.set_len(0).and_then(|()| file.write_all(said.as_bytes())).map_err(failed)?;
    Ok(Sole { _file: file })
}

/// Who has the root, for people.
fn holder(path: &std::path::Path) -> io::Result<String> {
    let mut said = String::new();
    File::open(path)?.take(1024).read_to_string(&mut said)?;
    Ok(said.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::instance_manager::RunBy;

    fn options(namespace: &str, root: &std::path::Path) -> Options {
        Options {
            node: "n1".into(),
            namespace: namespace.into(),
            root: root.into(),
            image: String::new(),
            instance_manager: RunBy::Others,
            authority: root.join("authority"),
            webhook: None,
            settings: std::sync::Arc::default(),
            clock: super::super::Clock::default(),
        }
    }

    #[tokio::test]
    async fn a_second_manager_of_a_root_waits_for_the_first() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        root.create().unwrap();
        let first = sole(&root, &options("a", dir.path())).await.unwrap();
        let (place, own) = (root.clone(), options("b", dir.path()));
        let second = tokio::spawn(async move { sole(&place, &own).await });
        tokio::time::sleep(LOOK * 2).await;
        assert!(!second.is_finished());
        assert_eq!(holder(&root.cluster_manager_lock()).unwrap(), "node n1, namespace a");
        drop(first);
        let second = tokio::time::timeout(Duration::from_secs(60), second).await.expect("it goes on");
        assert!(second.unwrap().is_ok());
        assert_eq!(holder(&root.cluster_manager_lock()).unwrap(), "node n1, namespace b");
    }
}
