//! Writes to the API server, each guarded by the version that was read.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::runtime::events::{Event as KubeEvent, EventType, Recorder, Reporter};
use kube::{Client, Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::json;
use thiserror::Error;

use super::clients::Clients;
use super::clock::Clock;
use super::patch;
use super::patience::Patience;
use crate::agent::AgentError;
use crate::plan::{Event, FINALIZER};

/// Why a look ended early.
#[derive(Debug, Error)]
pub(super) enum ReconcileError {
    /// What was read is old.
    #[error("what was read has changed since")]
    Stale,
    /// The API server refused or does not answer.
    #[error("{0}")]
    Api(Box<kube::Error>),
    /// The node refused or does not answer.
    #[error("{0}")]
    Agent(#[from] AgentError),
    /// Something that is needed is not there yet.
    #[error("{0}")]
    NotYet(String),
}

impl From<kube::Error> for ReconcileError {
    fn from(e: kube::Error) -> Self {
        match &e {
            kube::Error::Api(status) if status.code == 409 => Self::Stale,
            _ => Self::Api(Box::new(e)),
        }
    }
}

impl ReconcileError {
    /// What was written to is not there.
    pub(super) fn is_of_nothing(&self) -> bool {
        matches!(self, Self::Api(e) if is_missing(e))
    }
}

pub(super) type Done<T = ()> = Result<T, ReconcileError>;

/// True if the object is not there.
pub(super) fn is_missing(e: &kube::Error) -> bool {
    matches!(e, kube::Error::Api(status) if status.code == 404)
}

/// How often people are told of what lasts.
const REMINDS_EVERY: SignedDuration = SignedDuration::from_mins(30);

/// The API server, one namespace of it.
#[derive(Clone)]
pub(super) struct Desk {
    pub(super) client: Client,
    /// For watches alone.
    pub(super) watching: Client,
    pub(super) namespace: String,
    recorder: Recorder,
    identity: String,
    clock: Clock,
    reminders: Arc<Mutex<Reminders>>,
}

/// When people were told of what lasts, by the name of what it is about and what is said.
#[derive(Default)]
struct Reminders(BTreeMap<(String, String), Timestamp>);

impl Reminders {
    /// True if they were not told of late. What is long past is forgotten.
    fn is_due(&mut self, now: Timestamp, name: String, message: &str) -> bool {
        self.0.retain(|_, at| now.duration_since(*at) < REMINDS_EVERY);
        let key = (name, message.to_owned());
        let is_due = !self.0.contains_key(&key);
        self.0.entry(key).or_insert(now);
        is_due
    }
}

/// What every kind here is.
pub(super) trait Kind:
    Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Serialize + Debug
{
}

impl<K> Kind for K where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + DeserializeOwned
        + Serialize
        + Debug
{
}

impl Desk {
    pub(super) fn new(clients: Clients, namespace: &str, identity: &str, clock: Clock) -> Self {
        let Clients { requests: client, watches: watching } = clients;
        let reporter =
            Reporter { controller: "longhorn-manager".into(), instance: Some(identity.to_owned()) };
        let recorder = Recorder::new(client.clone(), reporter);
        let (namespace, identity) = (namespace.to_owned(), identity.to_owned());
        Self { client, watching, namespace, recorder, identity, clock, reminders: Arc::default() }
    }

    /// How long a lost watch of that kind waits.
    pub(super) fn patience<K: Resource<DynamicType = ()>>(&self) -> Patience {
        Patience::of(&self.identity, &K::kind(&()))
    }

    /// What time it is, as it is written.
    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    pub(super) fn api<K: Kind>(&self) -> Api<K> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    pub(super) fn watched<K: Kind>(&self) -> Api<K> {
        Api::namespaced(self.watching.clone(), &self.namespace)
    }

    /// Makes an object. One that is there already is as good.
    pub(super) async fn create<K: Kind>(&self, object: &K) -> Done {
        match self.api::<K>().create(&PostParams::default(), object).await {
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
            Err(e) => Err(e.into()),
            Ok(_) => Ok(()),
        }
    }

    /// Asks for an object to go. One that is gone is gone.
    pub(super) async fn delete<K: Kind>(&self, name: &str) -> Done {
        match self.api::<K>().delete(name, &DeleteParams::default()).await {
            Err(e) if !is_missing(&e) => Err(e.into()),
            _ => Ok(()),
        }
    }

    /// Asks for an object to go that is still as it was read. One that is gone is gone.
    pub(super) async fn delete_read<K: Kind>(&self, read: &K) -> Done {
        self.delete_if(read, read.resource_version()).await
    }

    /// Asks for an object to go that is the one that was read, however it is by now, and no other one of its name.
    pub(super) async fn delete_same<K: Kind>(&self, read: &K) -> Done {
        self.delete_if(read, None).await
    }

    async fn delete_if<K: Kind>(&self, read: &K, resource_version: Option<String>) -> Done {
        let seen = Preconditions { uid: read.uid(), resource_version };
        match self.api::<K>().delete(&read.name_any(), &DeleteParams::default().preconditions(seen)).await {
            Err(e) if !is_missing(&e) => Err(e.into()),
            _ => Ok(()),
        }
    }

    /// Changes the spec of an object that was read. Gives back its new version.
    pub(super) async fn set_spec<K: Kind, S: Serialize>(
        &self,
        read: &K,
        old: &S,
        new: &S,
    ) -> Done<Option<String>> {
        let version = read.resource_version();
        let Some(patch) = patch::of_part("spec", old, new, version.as_deref()) else { return Ok(version) };
        let done =
            self.api::<K>().patch(&read.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(done.resource_version())
    }

    /// Changes the status of an object that was read at that version.
    pub(super) async fn set_status<K: Kind, S: Serialize>(
        &self,
        name: &str,
        version: Option<&str>,
        old: &S,
        new: &S,
    ) -> Done {
        let Some(patch) = patch::of_part("status", old, new, version) else { return Ok(()) };
        self.api::<K>().patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await?;
        Ok(())
    }

    /// Changes a part of a status that nobody else writes, whatever else changes beside it.
    pub(super) async fn patch_status<K: Kind>(&self, name: &str, patch: serde_json::Value) -> Done {
        match self.api::<K>().patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await {
            Err(e) if !is_missing(&e) => Err(e.into()),
            _ => Ok(()),
        }
    }

    /// Puts the finalizer on an object that was read, or takes it off. Gives back the new version.
    pub(super) async fn set_finalizer<K: Kind>(&self, read: &K, keep: bool) -> Done<Option<String>> {
        let mut finalizers: Vec<String> =
            read.finalizers().iter().filter(|f| *f != FINALIZER).cloned().collect();
        if keep {
            finalizers.push(FINALIZER.to_owned());
        }
        let patch =
            json!({ "metadata": { "finalizers": finalizers, "resourceVersion": read.resource_version() } });
        let done =
            self.api::<K>().patch(&read.name_any(), &PatchParams::default(), &Patch::Merge(patch)).await;
        match done {
            Ok(object) => Ok(object.resource_version()),
            Err(e) if is_missing(&e) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Tells people of what lasts, and is found anew whenever somebody looks: once, and again now and then.
    pub(super) async fn remind<K: Kind>(&self, about: &K, event: &Event) {
        let reminders = || self.reminders.lock().unwrap_or_else(PoisonError::into_inner);
        if reminders().is_due(self.now(), about.name_any(), &event.message) {
            self.tell(about, event).await;
        }
    }

    /// Tells people. An event that cannot be written is not worth a failure.
    pub(super) async fn tell<K: Kind>(&self, about: &K, event: &Event) {
        let event = KubeEvent {
            type_: if event.warning { EventType::Warning } else { EventType::Normal },
            reason: event.reason.to_owned(),
            note: Some(event.message.chars().take(1000).collect()),
            action: "Reconcile".to_owned(),
            secondary: None,
        };
        if let Err(e) = self.recorder.publish(&event, &about.object_ref(&())).await {
            tracing::debug!(error = %e, "event not written");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lasts_is_told_once_and_now_and_then() {
        let mut reminders = Reminders::default();
        let begin = Timestamp::UNIX_EPOCH;
        let at = |minutes| begin + SignedDuration::from_mins(minutes);
        let mut is_told = |minutes, name: &str, what| reminders.is_due(at(minutes), name.to_owned(), what);
        assert!(is_told(0, "a", "it stays"));
        assert!((1..30).all(|minutes| !is_told(minutes, "a", "it stays")));
        assert!(is_told(29, "a", "it stays for another reason") && is_told(29, "b", "it stays"));
        assert!(is_told(30, "a", "it stays") && !is_told(31, "a", "it stays"));
        assert!(is_told(200, "c", "it stays"));
        assert_eq!(reminders.0.len(), 1, "what is long past is forgotten");
    }
}
