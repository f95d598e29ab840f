//! As much of an API server as the controllers use, in memory: objects with versions, merge patches, the status
//! subresource, finalizers, watches, owners. It can be slow, fail requests, lose answers and end watches by a seed, and be cut off
//! from a client.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Method, Request, Response};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;

/// The server; clones are the same one.
#[derive(Clone)]
pub(crate) struct ApiServer {
    state: Arc<Mutex<State>>,
    /// Rings with every change. In the order in which they came all that wait hear it.
    news: Arc<Notify>,
}

#[derive(Default)]
struct State {
    version: u64,
    objects: BTreeMap<(String, String), Value>,
    log: Vec<Change>,
    /// Of a hundred requests so many fail.
    faults: u64,
    dice: u64,
    /// Writes that were carried out.
    writes: u64,
    /// New objects of this kind are refused, with this code, reason and message.
    refused: Option<(&'static str, u16, &'static str, &'static str)>,
    /// Deletions of this object are refused.
    protected: Option<(&'static str, &'static str)>,
    /// Changes of this object are refused.
    fixed: Option<(&'static str, &'static str)>,
    /// Requests for this kind are never answered, nor carried out.
    swallowed: Option<&'static str>,
    /// Watches of this kind tell nothing for now, those of this client or all.
    held: Option<(&'static str, Option<String>)>,
    /// Lists of this kind are answered so late.
    late: Option<(&'static str, Duration)>,
    /// How often each kind was listed.
    lists: BTreeMap<String, usize>,
    /// How many objects of each kind were given at once at most.
    at_once: BTreeMap<String, usize>,
    /// Requests and answers, and what watches tell, take up to so many milliseconds each.
    slow: u64,
    /// Clients that nothing reaches, and that reach nothing.
    cut: BTreeSet<String>,
    /// What time it is; `None`: always the same.
    clock: Option<fn() -> String>,
}

/// How long a request waits for a server that is cut off.
const UNREACHED: Duration = Duration::from_secs(10);

/// One write.
struct Change {
    version: u64,
    at: String,
    resource: String,
    kind: &'static str,
    before: Option<Value>,
    object: Value,
}

impl Change {
    /// What a watch that selects tells of it: an object that is selected no more is deleted to whoever watches.
    fn told(&self, query: &BTreeMap<String, String>) -> Option<&'static str> {
        let was = self.before.as_ref().is_some_and(|before| is_selected(before, query));
        match (was, is_selected(&self.object, query)) {
            (false, false) => None,
            (true, false) => Some("DELETED"),
            (false, true) if self.kind == "MODIFIED" => Some("ADDED"),
            (_, true) => Some(self.kind),
        }
    }
}

impl State {
    /// A number below this one (a linear congruential generator, Knuth's constants).
    fn below(&mut self, limit: u64) -> u64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) % limit
    }

    /// True as often as requests fail now.
    fn fails(&mut self) -> bool {
        self.below(100) < self.faults
    }

    fn now(&self) -> String {
        self.clock.map_or_else(|| "2026-01-01T00:00:00Z".to_owned(), |now| now())
    }

    fn new_object(&self, name: &str) -> Value {
        json!({ "metadata": {
            "name": name, "namespace": "longhorn-system", "uid": format!("uid-{name}-{}", self.version), "creationTimestamp": self.now(),
        } })
    }

    /// The changes after a version.
    fn after(&self, version: u64) -> &[Change] {
        &self.log[self.log.partition_point(|c| c.version <= version)..]
    }

    fn store(&mut self, key: (String, String), mut object: Value, kind: &'static str) -> Value {
        self.version += 1;
        self.writes += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let before = self.objects.remove(&key);
        let (version, at, resource) = (self.version, self.now(), key.0.clone());
        self.log.push(Change { version, at, resource, kind, before, object: object.clone() });
        if kind != "DELETED" {
            self.objects.insert(key, object.clone());
        }
        object
    }
}

struct Failure(u16, &'static str, String);

struct Target {
    resource: String,
    name: Option<String>,
    status: bool,
}

impl Target {
    /// `/api/v1/[namespaces/NS/]RESOURCE[/NAME[/status]]`, and so with `/apis/GROUP/VERSION`.
    fn of(path: &str) -> Self {
        let mut parts: Vec<&str> = path.split('/').filter(|p| !p.is_empty()).collect();
        // Kubernetes and Longhorn both have nodes and attachments: its own kinds are told apart.
        let (length, core) = match (parts[0], parts[1]) {
            ("api", _) => (2, "core/"),
            (_, "storage.k8s.io") => (3, "storage/"),
            _ => (3, ""),
        };
        parts.drain(..length);
        if parts[0] == "namespaces" {
            parts.drain(..2);
        }
        let part = |i: usize| parts.get(i).map(|p| (*p).to_owned());
        Self {
            resource: format!("{core}{}", part(0).unwrap_or_default()),
            name: part(1),
            status: part(2).as_deref() == Some("status"),
        }
    }
}

fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        target.clone_from(patch);
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            target.as_object_mut().expect("an object").remove(key);
        } else {
            merge(&mut target[key], value);
        }
    }
}

/// As Kubernetes judges what a label may say.
fn may_be_a_label(value: &str) -> bool {
    let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let is_end = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    value.len() <= 63
        && value.chars().all(inner)
        && is_end(value.chars().next())
        && is_end(value.chars().last())
}

/// True for what the label selector and the field selector of a list or a watch select. One term each.
fn is_selected(object: &Value, query: &BTreeMap<String, String>) -> bool {
    let labels = &object["metadata"]["labels"];
    let by_label = match query.get("labelSelector").map(|s| s.split_once('=').ok_or(s)) {
        Some(Ok((key, value))) => labels[key] == *value,
        Some(Err(key)) => match key.strip_prefix('!') {
            Some(absent) => labels[absent].is_null(),
            None => !labels[key].is_null(),
        },
        None => true,
    };
    let field = |path: &str| path.split('.').fold(object, |at, name| &at[name]).as_str().unwrap_or_default();
    let by_field = query.get("fieldSelector").and_then(|s| s.split_once('='));
    by_label && by_field.is_none_or(|(path, value)| field(path) == value)
}

#[allow(dead_code, reason = "each test program uses a part of it")]
impl ApiServer {
    pub(crate) fn new(seed: u64) -> Self {
        let state = State { dice: seed, ..State::default() };
        Self { state: Arc::new(Mutex::new(state)), news: Arc::default() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on so many of a hundred requests fail, and as many watches end.
    pub(crate) fn fail(&self, percent: u64) {
        self.state().faults = percent;
    }

    /// From now on everything takes up to so many milliseconds each way.
    pub(crate) fn slow(&self, milliseconds: u64) {
        self.state().slow = milliseconds;
    }

    /// Cuts a client off, or lets it back.
    pub(crate) fn cut(&self, client: &str, is_cut: bool) {
        let mut state = self.state();
        if is_cut {
            state.cut.insert(client.to_owned())
        } else {
            state.cut.remove(client)
        };
        self.news.notify_waiters();
    }

    /// What time it is, for what is written into objects.
    pub(crate) fn tell_time(&self, clock: fn() -> String) {
        self.state().clock = Some(clock);
    }

    /// Deletes what has an owner that is not there any more, as Kubernetes' garbage collector.
    pub(crate) fn collect_garbage(&self) {
        let doomed: Vec<(String, String)> = {
            let state = self.state();
            let there: BTreeSet<&str> =
                state.objects.values().filter_map(|o| o["metadata"]["uid"].as_str()).collect();
            let is_left = |o: &Value| {
                let owners = o["metadata"]["ownerReferences"].as_array();
                o["metadata"]["deletionTimestamp"].is_null()
                    && owners.is_some_and(|all| {
                        !all.is_empty()
                            && all
                                .iter()
                                .all(|owner| owner["uid"].as_str().is_none_or(|uid| !there.contains(uid)))
                    })
            };
            state.objects.iter().filter(|(_, o)| is_left(o)).map(|(key, _)| key.clone()).collect()
        };
        doomed.iter().for_each(|(resource, name)| self.delete(resource, name));
    }

    /// From now on new objects of this kind are refused, as webhooks do it.
    pub(crate) fn refuse(&self, resource: &'static str, code: u16, reason: &'static str, why: &'static str) {
        self.state().refused = Some((resource, code, reason, why));
    }

    /// From now on this object is not deleted, as a webhook has it.
    pub(crate) fn protect(&self, resource: &'static str, name: &'static str) {
        self.state().protected = Some((resource, name));
    }

    /// From now on this object does not change, as one that the rules of its definition forbid by now.
    pub(crate) fn fix(&self, resource: &'static str, name: &'static str) {
        self.state().fixed = Some((resource, name));
    }

    /// From now on requests for this kind get no answer, as over a connection at whose other end nobody is any more; those
    /// that were made meanwhile never get one.
    pub(crate) fn swallow(&self, resource: Option<&'static str>) {
        self.state().swallowed = resource;
    }

    /// Until the next call watches of this kind tell nothing, and then all of it.
    pub(crate) fn hold_news(&self, resource: Option<&'static str>) {
        self.hold(resource.map(|resource| (resource, None)));
    }

    /// The same of one client's watches alone.
    pub(crate) fn hold_news_of(&self, client: &str, resource: &'static str) {
        self.hold(Some((resource, Some(client.to_owned()))));
    }

    fn hold(&self, held: Option<(&'static str, Option<String>)>) {
        self.state().held = held;
        self.news.notify_waiters();
    }

    /// How many objects of a kind one answer has had at most; `None`: nobody has asked for all of them.
    pub(crate) fn at_once(&self, resource: &str) -> Option<usize> {
        self.state().at_once.get(resource).copied()
    }

    /// From now on lists of this kind are answered only after so long.
    pub(crate) fn late(&self, lists: Option<(&'static str, Duration)>) {
        self.state().late = lists;
    }

    /// How often a kind was listed so far, or one page of it.
    pub(crate) fn lists(&self, resource: &str) -> usize {
        self.state().lists.get(resource).copied().unwrap_or_default()
    }

    /// Writes that were carried out so far.
    pub(crate) fn writes(&self) -> u64 {
        self.state().writes
    }

    /// Those among them of anything but this kind.
    pub(crate) fn writes_beside(&self, resource: &str) -> usize {
        self.state().log.iter().filter(|change| change.resource != resource).count()
    }

    /// The last writes of anything but leases, for people.
    pub(crate) fn last_writes(&self, count: usize) -> Vec<String> {
        let state = self.state();
        let all = state.log.iter().rev().filter(|change| change.resource != "leases").take(count);
        all.map(|c| {
            format!(
                "{} {}\n  before {}\n  after {}",
                c.kind,
                c.resource,
                c.before.clone().unwrap_or_default(),
                c.object
            )
        })
        .collect()
    }

    /// Which objects of these kinds came and went, and which were asked to go, with what they are, for people.
    pub(crate) fn chronicle(&self, kinds: &[&str]) -> Vec<String> {
        let state = self.state();
        let is_asked = |c: &Change| {
            let was = c.before.as_ref().is_some_and(|b| !b["metadata"]["deletionTimestamp"].is_null());
            !was && !c.object["metadata"]["deletionTimestamp"].is_null()
        };
        let counts =
            |c: &&Change| kinds.contains(&c.resource.as_str()) && (c.kind != "MODIFIED" || is_asked(c));
        let told = |c: &Change| {
            let what = if is_asked(c) { "to be DELETED" } else { c.kind };
            format!("{} {what} {} {} {}", c.at, c.resource, c.object["metadata"]["name"], c.object["spec"])
        };
        state.log.iter().filter(counts).map(told).collect()
    }

    /// What the objects of a kind became one after the other, and when; of one that was deleted only its name.
    pub(crate) fn course_of(&self, resource: &str) -> Vec<(String, Value)> {
        let gone = |o: &Value| json!({ "metadata": { "name": o["metadata"]["name"] } });
        let became = |c: &Change| if c.kind == "DELETED" { gone(&c.object) } else { c.object.clone() };
        let state = self.state();
        let all = state.log.iter().filter(|c| c.resource == resource);
        all.map(|c| (c.at.clone(), became(c))).collect()
    }

    /// What an object was after each write of it so far.
    pub(crate) fn history(&self, resource: &str, name: &str) -> Vec<Value> {
        let state = self.state();
        let is_of = |o: &Value| o["metadata"]["name"] == name;
        let all = state.log.iter().filter(|c| c.resource == resource && is_of(&c.object));
        all.map(|c| c.object.clone()).collect()
    }

    pub(crate) fn client(&self) -> kube::Client {
        self.client_of("")
    }

    /// The client of somebody who can be cut off.
    pub(crate) fn client_of(&self, who: &str) -> kube::Client {
        kube::Client::new(Service { server: self.clone(), who: who.to_owned() }, "longhorn-system")
    }

    /// Everything of one kind.
    pub(crate) fn all(&self, resource: &str) -> Vec<Value> {
        let state = self.state();
        state.objects.iter().filter(|((r, _), _)| r == resource).map(|(_, o)| o.clone()).collect()
    }

    pub(crate) fn get(&self, resource: &str, name: &str) -> Option<Value> {
        self.state().objects.get(&(resource.to_owned(), name.to_owned())).cloned()
    }

    /// Makes or changes an object as a user would.
    pub(crate) fn apply(&self, resource: &str, name: &str, patch: &Value) {
        let mut state = self.state();
        let key = (resource.to_owned(), name.to_owned());
        let kind = if state.objects.contains_key(&key) { "MODIFIED" } else { "ADDED" };
        let mut object = state.objects.get(&key).cloned().unwrap_or_else(|| state.new_object(name));
        merge(&mut object, patch);
        state.store(key, object, kind);
        self.news.notify_waiters();
    }

    /// Takes all finalizers off an object that is deleted, as a user who knows better.
    pub(crate) fn let_go(&self, resource: &str, name: &str) {
        let mut state = self.state();
        let key = (resource.to_owned(), name.to_owned());
        let Some(object) = state.objects.get(&key).cloned() else { return };
        state.store(key, object, "DELETED");
        self.news.notify_waiters();
    }

    pub(crate) fn delete(&self, resource: &str, name: &str) {
        let name = Some(name.to_owned());
        let _ = self.remove(&Target { resource: resource.to_owned(), name, status: false }, b"");
    }

    fn is_cut(&self, who: &str) -> bool {
        self.state().cut.contains(who)
    }

    /// As long as anything takes on its way.
    async fn wait(&self) {
        let (slow, wait) = {
            let mut state = self.state();
            let slow = state.slow;
            (slow, state.below(slow + 1))
        };
        if slow > 0 {
            tokio::time::sleep(Duration::from_millis(wait)).await;
        }
    }

    /// Waits until the client is let back, or has waited long enough.
    async fn unreached(&self, who: &str) {
        let back = async {
            loop {
                let news = self.news.notified();
                if !self.is_cut(who) {
                    return;
                }
                news.await;
            }
        };
        let _ = tokio::time::timeout(UNREACHED, back).await;
    }

    fn answer(
        &self,
        method: &Method,
        target: &Target,
        query: &BTreeMap<String, String>,
        body: &[u8],
    ) -> Result<Value, Failure> {
        {
            let mut state = self.state();
            if state.fails() {
                return Err(Failure(503, "ServiceUnavailable", "the dice said so".to_owned()));
            }
        }
        match *method {
            Method::GET => self.read(target, query),
            Method::POST => self.create(target, body),
            Method::DELETE => self.remove(target, body),
            _ => self.change(method, target, body),
        }
    }

    /// The same, over a network.
    async fn asked(
        &self,
        who: &str,
        method: &Method,
        target: &Target,
        query: &BTreeMap<String, String>,
        body: &[u8],
    ) -> Result<Value, Failure> {
        let lost = || Failure(504, "Timeout", "no answer".to_owned());
        self.wait().await;
        if self.is_cut(who) {
            self.unreached(who).await;
            return Err(lost());
        }
        let answer = self.answer(method, target, query, body);
        self.wait().await;
        let late = self.state().late.filter(|(kind, _)| *kind == target.resource && target.name.is_none());
        if let Some((_, time)) = late.filter(|_| *method == Method::GET) {
            tokio::time::sleep(time).await;
        }
        // Carried out it is all the same.
        let is_slow = self.state().slow > 0;
        if is_slow && self.state().fails() || self.is_cut(who) {
            return Err(lost());
        }
        answer
    }

    fn read(&self, target: &Target, query: &BTreeMap<String, String>) -> Result<Value, Failure> {
        let Some(name) = &target.name else {
            return match query.get("labelSelector").and_then(|s| s.split_once('=')) {
                Some((_, value)) if !may_be_a_label(value) => Err(Failure(
                    400,
                    "BadRequest",
                    format!("values[0][longhornvolume]: Invalid value: {value:?}"),
                )),
                _ => Ok(self.list(target, query)),
            };
        };
        self.get(&target.resource, name).ok_or_else(|| missing(target))
    }

    /// All objects of a kind, or a page of them: the name of its last one says where the next page begins.
    fn list(&self, target: &Target, query: &BTreeMap<String, String>) -> Value {
        let last = query.get("continue").map_or("", String::as_str);
        let is_next = |o: &Value| o["metadata"]["name"].as_str() > Some(last) && is_selected(o, query);
        let mut items: Vec<Value> = self.all(&target.resource).into_iter().filter(is_next).collect();
        let limit = query.get("limit").and_then(|l| l.parse().ok()).unwrap_or(usize::MAX);
        let mut state = self.state();
        let mut metadata = json!({ "resourceVersion": state.version.to_string() });
        if items.len() > limit {
            items.truncate(limit);
            metadata["continue"] = items.last().map(|o| o["metadata"]["name"].clone()).unwrap_or_default();
        }
        *state.lists.entry(target.resource.clone()).or_default() += 1;
        let most = state.at_once.entry(target.resource.clone()).or_default();
        *most = (*most).max(items.len());
        json!({ "kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items })
    }

    fn create(&self, target: &Target, body: &[u8]) -> Result<Value, Failure> {
        let mut object: Value = serde_json::from_slice(body).expect("JSON");
        let mut state = self.state();
        let name = match object["metadata"]["name"].as_str() {
            Some(name) => name.to_owned(),
            None => format!("generated-{}", state.version),
        };
        let key = (target.resource.clone(), name.clone());
        if let Some((_, code, reason, why)) = state.refused.filter(|(kind, ..)| *kind == target.resource) {
            return Err(Failure(code, reason, why.to_owned()));
        }
        if state.objects.contains_key(&key) {
            return Err(Failure(409, "AlreadyExists", name));
        }
        let fresh = state.new_object(&name);
        merge(&mut object["metadata"], &fresh["metadata"]);
        if target.resource != "leases" && target.resource != "core/secrets" && target.resource != "events" {
            object.as_object_mut().expect("an object").remove("status");
        }
        let stored = state.store(key, object, "ADDED");
        self.news.notify_waiters();
        Ok(stored)
    }

    fn change(&self, method: &Method, target: &Target, body: &[u8]) -> Result<Value, Failure> {
        let patch: Value = serde_json::from_slice(body).expect("JSON");
        let key = (target.resource.clone(), target.name.clone().unwrap_or_default());
        let mut state = self.state();
        let Some(old) = state.objects.get(&key).cloned() else { return Err(missing(target)) };
        if state.fixed == Some((key.0.as_str(), key.1.as_str())) {
            return Err(Failure(422, "Invalid", format!("{} is wrong as it is", key.1)));
        }
        let version = &patch["metadata"]["resourceVersion"];
        if !version.is_null() && *version != old["metadata"]["resourceVersion"] {
            return Err(Failure(409, "Conflict", format!("{} has changed", key.1)));
        }
        let mut new = old.clone();
        if *method == Method::PUT {
            new.clone_from(&patch);
        } else if target.status {
            merge(&mut new, &json!({ "status": patch["status"] }));
        } else {
            let mut patch = patch;
            patch.as_object_mut().expect("an object").remove("status");
            merge(&mut new, &patch);
        }
        let unchanged = {
            let mut a = new.clone();
            a["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"].clone();
            a == old
        };
        if unchanged {
            return Ok(old);
        }
        let gone = !new["metadata"]["deletionTimestamp"].is_null()
            && new["metadata"]["finalizers"].as_array().is_none_or(Vec::is_empty);
        let stored = state.store(key, new, if gone { "DELETED" } else { "MODIFIED" });
        self.news.notify_waiters();
        Ok(stored)
    }

    fn remove(&self, target: &Target, body: &[u8]) -> Result<Value, Failure> {
        let key = (target.resource.clone(), target.name.clone().unwrap_or_default());
        let options: Value = serde_json::from_slice(body).unwrap_or_default();
        let mut state = self.state();
        let Some(mut object) = state.objects.get(&key).cloned() else { return Err(missing(target)) };
        if state.protected == Some((key.0.as_str(), key.1.as_str())) {
            return Err(Failure(403, "Forbidden", format!("{} stays", key.1)));
        }
        for condition in ["uid", "resourceVersion"] {
            let asked = &options["preconditions"][condition];
            if !asked.is_null() && *asked != object["metadata"][condition] {
                return Err(Failure(409, "Conflict", format!("{} is another one", key.1)));
            }
        }
        let is_kept = object["metadata"]["finalizers"].as_array().is_some_and(|f| !f.is_empty());
        if is_kept {
            if object["metadata"]["deletionTimestamp"].is_null() {
                object["metadata"]["deletionTimestamp"] = json!(state.now());
                object = state.store(key, object, "MODIFIED");
            }
        } else {
            object = state.store(key, object, "DELETED");
        }
        self.news.notify_waiters();
        Ok(object)
    }

    /// Sends every change after `version` until the client goes, or is cut off, or the dice end it.
    async fn send_changes(
        self,
        who: String,
        target: Target,
        query: BTreeMap<String, String>,
        sender: mpsc::Sender<Result<Frame<Bytes>, Infallible>>,
    ) {
        let mut version: u64 = query.get("resourceVersion").and_then(|v| v.parse().ok()).unwrap_or_default();
        loop {
            let news = self.news.notified();
            let (changes, ends): (Vec<String>, bool) = {
                let mut state = self.state();
                let is_held = state.held.as_ref().is_some_and(|(kind, whose)| {
                    *kind == target.resource && whose.as_ref().is_none_or(|whose| *whose == who)
                });
                let upto = if is_held { version } else { state.version };
                let of_kind = state.after(version).iter().filter(|c| c.resource == target.resource);
                let newer = of_kind.filter(|c| c.version <= upto);
                let lines: Vec<String> = newer
                    .filter_map(|c| Some((c.told(&query)?, &c.object)))
                    .map(|(kind, object)| format!("{}\n", json!({ "type": kind, "object": object })))
                    .collect();
                version = upto;
                (lines, state.fails())
            };
            if !changes.is_empty() {
                self.wait().await;
            }
            // Who was cut off hears nothing of that any more, and begins a watch anew once it is back.
            if self.is_cut(&who) {
                tokio::select! {
                    biased;
                    () = self.unreached(&who) => return,
                    () = sender.closed() => return,
                }
            }
            for line in changes {
                if sender.send(Ok(Frame::data(line.into()))).await.is_err() {
                    return;
                }
            }
            tokio::select! {
                biased;
                () = news => if ends { return },
                () = sender.closed() => return,
            }
        }
    }
}

fn missing(target: &Target) -> Failure {
    Failure(404, "NotFound", format!("{} {:?} not found", target.resource, target.name))
}

#[derive(Clone)]
struct Service {
    server: ApiServer,
    who: String,
}

type Body = StreamBody<ReceiverStream<Result<Frame<Bytes>, Infallible>>>;

impl tower::Service<Request<kube::client::Body>> for Service {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<kube::client::Body>) -> Self::Future {
        let (server, who) = (self.server.clone(), self.who.clone());
        Box::pin(async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.expect("a body in memory").to_bytes();
            let query: BTreeMap<String, String> = parts
                .uri
                .query()
                .unwrap_or_default()
                .split('&')
                .filter_map(|pair| pair.split_once('='))
                .map(|(k, v)| (k.to_owned(), v.replace("%2F", "/").replace("%3D", "=").replace("%21", "!")))
                .collect();
            let target = Target::of(parts.uri.path());
            let is_swallowed = server.state().swallowed.is_some_and(|resource| resource == target.resource);
            if is_swallowed {
                std::future::pending::<()>().await;
            }
            let (sender, receiver) = mpsc::channel(16);
            let mut code = 200;
            if query.get("watch").is_some_and(|w| w == "true" || w == "1") {
                tokio::spawn(server.send_changes(who, target, query, sender));
            } else {
                let answer = server.asked(&who, &parts.method, &target, &query, &body).await;
                let answer = answer.unwrap_or_else(|failure| {
                    let Failure(status, reason, message) = failure;
                    code = status;
                    json!({ "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                        "code": status, "reason": reason, "message": message })
                });
                let bytes = serde_json::to_vec(&answer).expect("JSON");
                let _ = sender.send(Ok(Frame::data(bytes.into()))).await;
            }
            let body = StreamBody::new(ReceiverStream::new(receiver));
            Ok(Response::builder().status(code).body(body).expect("a response"))
        })
    }
}
