//! Objects of one kind as the API server last told of them, by name and by what they belong to.
//!
//! A look at one volume reads what is of that volume, however many others there are. Two counters say whether anything is
//! there that could change a decision about all: objects that came and went, and those that differ in what counts.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use kube::ResourceExt;
use kube::runtime::watcher::Event;
use serde::de::DeserializeOwned;
use tokio::sync::watch;

/// What can be kept on a shelf.
pub(super) trait Item:
    kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static
{
    /// What it belongs to, its volume for one; empty: nothing that anybody asks for.
    fn owner(&self) -> &str {
        ""
    }

    /// True if a decision about all objects of the kind could become another one.
    fn counts_otherwise(&self, _before: &Self) -> bool {
        true
    }
}

/// The objects of one kind. Clones are the same shelf.
pub(super) struct Shelf<K> {
    content: Arc<RwLock<Content<K>>>,
    ready: watch::Sender<bool>,
}

impl<K> Clone for Shelf<K> {
    fn clone(&self) -> Self {
        Self { content: Arc::clone(&self.content), ready: self.ready.clone() }
    }
}

/// What a watch told of an object.
#[derive(Debug)]
pub(super) struct Told<K> {
    /// The object, or what it was when it went.
    pub(super) object: Arc<K>,
    /// What it was before; `None`: it came or went.
    pub(super) before: Option<Arc<K>>,
    /// False for one that went.
    pub(super) is_there: bool,
}

struct Content<K> {
    objects: BTreeMap<String, Arc<K>>,
    of: BTreeMap<String, BTreeSet<String>>,
    stamp: u64,
    changes: u64,
    /// What a list that is not at its end yet has told.
    listed: BTreeMap<String, K>,
}

impl<K: Item> Content<K> {
    fn put(&mut self, object: K) -> Told<K> {
        self.changes += 1;
        let name = object.name_any();
        let before = self.objects.get(&name).cloned();
        if before.as_ref().is_none_or(|before| object.counts_otherwise(before)) {
            self.stamp += 1;
        }
        if before.as_ref().is_none_or(|before| before.owner() != object.owner()) {
            self.disown(before.as_deref());
            if !object.owner().is_empty() {
                self.of.entry(object.owner().to_owned()).or_default().insert(name.clone());
            }
        }
        let object = Arc::new(object);
        self.objects.insert(name, Arc::clone(&object));
        Told { object, before, is_there: true }
    }

    fn take(&mut self, name: &str) {
        if let Some(before) = self.objects.remove(name) {
            self.stamp += 1;
            self.changes += 1;
            self.disown(Some(&before));
        }
    }

    fn disown(&mut self, object: Option<&K>) {
        let Some(object) = object else { return };
        if let Some(names) = self.of.get_mut(object.owner()) {
            names.remove(&object.name_any());
            if names.is_empty() {
                self.of.remove(object.owner());
            }
        }
    }

    /// Puts what a whole list told in place of everything. Gives back what differs, of both.
    fn replace_all(&mut self) -> Vec<Told<K>> {
        let listed = std::mem::take(&mut self.listed);
        let gone: Vec<Arc<K>> = self
            .objects
            .iter()
            .filter(|(name, _)| !listed.contains_key(*name))
            .map(|(_, o)| o.clone())
            .collect();
        for object in &gone {
            self.take(&object.name_any());
        }
        let gone = gone.into_iter().map(|object| Told { object, before: None, is_there: false });
        let mut changed: Vec<Told<K>> = gone.collect();
        for (name, object) in listed {
            let before = self.objects.get(&name).and_then(|before| before.resource_version());
            if before.is_none() || before != object.resource_version() {
                changed.push(self.put(object));
            }
        }
        changed
    }
}

impl<K: Item> Shelf<K> {
    pub(super) fn new() -> Self {
        let content = Content {
            objects: BTreeMap::new(),
            of: BTreeMap::new(),
            stamp: 0,
            changes: 0,
            listed: BTreeMap::new(),
        };
        Self { content: Arc::new(RwLock::new(content)), ready: watch::channel(false).0 }
    }

    fn read(&self) -> RwLockReadGuard<'_, Content<K>> {
        self.content.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Content<K>> {
        self.content.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes in what a watch told. Gives back the objects that are news.
    pub(super) fn hear(&self, event: Event<K>) -> Vec<Told<K>> {
        let mut content = self.write();
        match event {
            Event::Apply(object) => vec![content.put(object)],
            Event::Delete(object) => {
                content.take(&object.name_any());
                vec![Told { object: Arc::new(object), before: None, is_there: false }]
            }
            Event::Init => {
                content.listed.clear();
                Vec::new()
            }
            Event::InitApply(object) => {
                content.listed.insert(object.name_any(), object);
                Vec::new()
            }
            Event::InitDone => {
                let changed = content.replace_all();
                drop(content);
                self.ready.send_replace(true);
                changed
            }
        }
    }

    /// Waits until everything was told once.
    pub(super) async fn ready(&self) {
        // The sender is this shelf's own.
        let _ = self.ready.subscribe().wait_for(|ready| *ready).await;
    }

    /// The object of that name.
    pub(super) fn get(&self, name: &str) -> Option<Arc<K>> {
        self.read().objects.get(name).cloned()
    }

    /// All that belong to it, by name.
    pub(super) fn of(&self, owner: &str) -> Vec<Arc<K>> {
        let content = self.read();
        let names = content.of.get(owner).into_iter().flatten();
        names.filter_map(|name| content.objects.get(name).cloned()).collect()
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<Arc<K>> {
        self.read().objects.values().cloned().collect()
    }

    /// Another number after every change.
    pub(super) fn changes(&self) -> u64 {
        self.read().changes
    }

    /// Another number after every change that counts.
    pub(super) fn stamp(&self) -> u64 {
        self.read().stamp
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Int64Text, Replica, ReplicaSpec};

    fn replica(name: &str, volume: &str, version: &str) -> Replica {
        let spec = ReplicaSpec { volume_name: volume.into(), ..ReplicaSpec::default() };
        let mut replica = Replica::new(name, spec);
        replica.metadata.resource_version = Some(version.into());
        replica
    }

    fn names(of: &[Arc<Replica>]) -> Vec<String> {
        let mut names: Vec<String> = of.iter().map(|r| r.name_any()).collect();
        names.sort();
        names
    }

    fn list(shelf: &Shelf<Replica>, all: &[Replica]) -> Vec<String> {
        shelf.hear(Event::Init);
        for one in all {
            assert!(shelf.hear(Event::InitApply(one.clone())).is_empty());
        }
        let told = shelf.hear(Event::InitDone).into_iter();
        names(&told.map(|told| told.object).collect::<Vec<_>>())
    }

    #[test]
    fn what_belongs_to_a_volume_is_found_and_leaves_with_it() {
        let shelf = Shelf::new();
        for (name, volume) in [("a1", "a"), ("a2", "a"), ("b1", "b")] {
            shelf.hear(Event::Apply(replica(name, volume, "1")));
        }
        assert_eq!(
            (names(&shelf.of("a")), names(&shelf.of("b"))),
            (vec!["a1".into(), "a2".into()], vec!["b1".into()])
        );
        shelf.hear(Event::Apply(replica("a2", "b", "2")));
        shelf.hear(Event::Delete(replica("a1", "a", "1")));
        assert_eq!((names(&shelf.of("a")), names(&shelf.of("b"))), (vec![], vec!["a2".into(), "b1".into()]));
        assert_eq!((shelf.all().len(), shelf.get("a1").is_none()), (2, true));
        assert!(shelf.of("").is_empty());
    }

    #[test]
    fn after_a_lost_watch_only_what_differs_is_news() {
        let shelf = Shelf::new();
        let [a, b, c] = ["a", "b", "c"].map(|name| replica(name, "v", "1"));
        assert_eq!(list(&shelf, &[a.clone(), b, c.clone()]), ["a", "b", "c"]);
        let changed = replica("a", "v", "2");
        assert_eq!(list(&shelf, &[changed.clone(), c.clone(), replica("d", "v", "1")]), ["a", "b", "d"]);
        assert_eq!(names(&shelf.of("v")), ["a", "c", "d"]);
        // A list that was begun and not finished tells nothing.
        shelf.hear(Event::Init);
        assert!(list(&shelf, &[changed, c, replica("d", "v", "1")]).is_empty());
    }

    #[test]
    fn only_what_counts_gives_another_stamp() {
        let shelf = Shelf::new();
        let mut one = replica("a", "v", "1");
        let stamp = |one: &Replica| {
            shelf.hear(Event::Apply(one.clone()));
            shelf.stamp()
        };
        assert_eq!((stamp(&one), stamp(&one)), (1, 1));
        one.spec.healthy_at = "2026-01-01T00:00:00Z".into();
        assert_eq!(stamp(&one), 1, "the room that it takes is the same");
        one.spec.volume_size = Int64Text(7);
        assert_eq!(stamp(&one), 2);
        shelf.hear(Event::Delete(one));
        assert_eq!(shelf.stamp(), 3);
    }
}
