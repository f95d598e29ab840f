//! Tells the processes of a root at which level they log (`levels`).

use std::collections::BTreeMap;
use std::time::Duration;

use futures::future::join_all;
use tonic::Code;

use super::registry::Registry;
use crate::host::Root;
use crate::logging::{self, Level};
use crate::proto::process::LogLevel;
use crate::proto::process::logging_client::LoggingClient;
use crate::transport::connect;

/// Until a process that did not answer is told again: it may be starting.
const AGAIN: Duration = Duration::from_secs(1);

/// How long a process may take to answer. One that waits for a slow disk is told again.
const PATIENCE: Duration = Duration::from_secs(2);

/// Tells processes, for ever: all when the level changes, and each that starts, since it may have been started before that.
pub(super) async fn keep(registry: &Registry) {
    let mut said = registry.levels().watch();
    let mut changes = registry.watch();
    let mut told: BTreeMap<String, (u32, Level)> = BTreeMap::new();
    loop {
        let level = *said.borrow_and_update();
        let missed = match level {
            Some(level) => tell(registry, &mut told, level).await,
            None => false,
        };
        tokio::select! {
            // Neither ends before the registry does.
            _ = said.changed() => {}
            _ = changes.recv() => {}
            () = tokio::time::sleep(AGAIN), if missed => {}
        }
    }
}

/// Tells those that have not heard of this level. True: not all of them have answered.
async fn tell(registry: &Registry, told: &mut BTreeMap<String, (u32, Level)>, level: Level) -> bool {
    let running = registry.running();
    told.retain(|name, known| running.get(name).is_some_and(|pid| *known == (*pid, level)));
    let asks = running.into_iter().filter(|(name, _)| !told.contains_key(name)).map(async |(name, pid)| {
        let has_heard = hears(registry.root(), &name, level).await;
        (name, pid, has_heard)
    });
    let mut missed = false;
    for (name, pid, has_heard) in join_all(asks.collect::<Vec<_>>()).await {
        missed |= !has_heard;
        if has_heard {
            told.insert(name, (pid, level));
        }
    }
    missed
}

async fn hears(root: &Root, name: &str, level: Level) -> bool {
    let ask = async {
        let mut client = LoggingClient::new(connect(&root.control_socket(name)).await.ok()?);
        match client.level_set(LogLevel { level: logging::word(level).to_owned() }).await {
            Ok(_) => Some(()),
            // An older program knows of no such call, however often it is asked.
            Err(status) => (status.code() == Code::Unimplemented).then_some(()),
        }
    };
    tokio::time::timeout(PATIENCE, ask).await.ok().flatten().is_some()
}
