//! The key of a volume: 32 random bytes in a Secret, laid on the nodes whose engine and replicas prove it to each other.
//!
//! It is no part of the data: a volume whose Secret somebody deleted, or did not restore with the rest, goes on with the key
//! that a node still has, or, where nothing of it runs, with a new one.

use std::collections::BTreeMap;

use control::random;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::Resource;
use kube::api::{ListParams, ObjectMeta};

use super::Context;
use super::desk::{Desk, Done, ReconcileError};
use super::processes::engines_of;
use crate::api::{Engine, InstanceState, Replica, Volume};
use crate::plan::VOLUME_LABEL;

/// Bytes of a volume's key.
const KEY_LEN: usize = 32;

/// The entry of the Secret.
const ENTRY: &str = "key";

/// The secret that holds a volume's key.
pub(super) fn key_secret(volume: &str) -> String {
    format!("longhorn-volume-key-{volume}")
}

/// Makes the Secret with a new key, unless it is there.
pub(super) async fn create_key(desk: &Desk, volume: &Volume) -> Done {
    let key = random::bytes::<KEY_LEN>().map_err(|e| ReconcileError::NotYet(e.to_string()))?;
    store_key(desk, volume, key.to_vec()).await
}

/// Makes the Secret of a volume, which goes with it, unless it is there.
async fn store_key(desk: &Desk, volume: &Volume, key: Vec<u8>) -> Done {
    let name = volume.metadata.name.clone().unwrap_or_default();
    let metadata = ObjectMeta {
        name: Some(key_secret(&name)),
        labels: Some([(VOLUME_LABEL.to_owned(), name)].into()),
        owner_references: volume.controller_owner_ref(&()).map(|owner| vec![owner]),
        ..ObjectMeta::default()
    };
    let data: BTreeMap<String, ByteString> = [(ENTRY.to_owned(), ByteString(key))].into();
    desk.create(&Secret { metadata, data: Some(data), ..Secret::default() }).await
}

/// Lays the volume's key on this node.
pub(super) async fn lay_key(context: &Context, volume: &str) -> Done {
    let secrets = context.desk.api::<Secret>();
    let secret = match secrets.get_opt(&key_secret(volume)).await? {
        Some(secret) => secret,
        None => {
            make_again(context, volume).await?;
            // Somebody else may have been faster.
            secrets.get(&key_secret(volume)).await?
        }
    };
    let key = secret.data.as_ref().and_then(|data| data.get(ENTRY));
    let key =
        key.ok_or_else(|| ReconcileError::NotYet(format!("secret {} has no key", key_secret(volume))))?;
    Ok(context.agent.store_key(volume, &key.0).await?)
}

/// Makes a Secret that is lost: with the key that was laid here once, or, where nothing of the volume runs with another one, with
/// a new key.
async fn make_again(context: &Context, name: &str) -> Done {
    let desk = &context.desk;
    let volume = desk.api::<Volume>().get_opt(name).await?;
    let Some(volume) = volume.filter(|v| v.metadata.deletion_timestamp.is_none()) else {
        return Err(ReconcileError::NotYet(format!("volume {name} is gone, or goes")));
    };
    let root = control::host::Root::at(&context.options.root).ok();
    let laid = root.and_then(|root| control::host::read_key(&root.key(name)).ok());
    tracing::warn!(
        volume = name,
        from_this_node = laid.is_some(),
        "the volume's key was lost and is stored anew"
    );
    if let Some(laid) = laid {
        return store_key(desk, &volume, laid.to_vec()).await;
    }
    let of_volume = ListParams::default().fields(&format!("spec.volumeName={name}"));
    let replicas = desk.api::<Replica>().list(&of_volume).await?.items;
    if runs(&engines_of(desk, name).await?, &replicas) {
        return Err(ReconcileError::NotYet(format!(
            "secret {} is lost, and what runs of the volume has a key that this node has not: it is stored anew when one of those \
             processes starts again, or when the volume is detached and attached",
            key_secret(name)
        )));
    }
    create_key(desk, &volume).await
}

/// True if an engine or a replica may run, with whatever key.
fn runs(engines: &[Engine], replicas: &[Replica]) -> bool {
    let may_run = |state: InstanceState| state != InstanceState::Stopped && state != InstanceState::Error;
    let engines = engines.iter().filter_map(|e| e.status.as_ref()).map(|s| s.current_state);
    let replicas = replicas.iter().filter_map(|r| r.status.as_ref()).map(|s| s.current_state);
    engines.chain(replicas).any(may_run)
}
