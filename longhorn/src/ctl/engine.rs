//! An engine for one operation: the volume's own if it is up, else one that shows nothing and ends afterwards.

use anyhow::Result;
use control::host::{LiveDirs, VolumeRecord};

use super::manager::Manager;
use super::observe::has_processes;
use super::{Context, down, lock, up};
use crate::arguments::Frontend;
use crate::progress::Progress;

/// Does some work while the volume has an engine. Nobody else starts or stops the volume meanwhile.
///
/// # Errors
/// There is no such volume, it does not start, or the work's own.
pub(super) async fn with_engine<T>(
    context: &Context,
    volume: &str,
    work: impl AsyncFnOnce(&mut VolumeRecord, &mut Progress) -> Result<T>,
) -> Result<T> {
    let root = &context.root;
    let (_lock, mut record) = lock::volume(root, volume)?;
    record.check_ready()?;
    let mut progress = Progress::new();
    if has_processes(root, &record)? {
        return work(&mut record, &mut progress).await;
    }
    LiveDirs::default().check_free(volume, root)?;
    let mut manager = Manager::ensure(root).await?;
    let mut quiet = record.clone();
    (quiet.frontend, quiet.listen) = (Frontend::None.to_string(), None);
    let started = async {
        up::start(root, &quiet, &mut manager, false, &mut progress).await?;
        up::wait_until_usable(root, &quiet, &mut manager, &mut progress).await
    };
    let done = match started.await {
        Ok(_) => work(&mut record, &mut progress).await,
        Err(e) => Err(e),
    };
    let stopped = down::stop(context, &record, &mut progress).await;
    let done = done?;
    stopped?;
    Ok(done)
}
