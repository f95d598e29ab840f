//! A question of the API server and its answer: AdmissionReview, `admission.k8s.io/v1` (Kubernetes' reference "Dynamic
//! Admission Control", and `k8s.io/api/admission/v1/types.go`).

use k8s_openapi::ByteString;
use kube::core::ObjectMeta;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

use super::{Change, Facts, NO_JOBS, Refusal, node, replica, setting, snapshot, volume};
use crate::api::{Node, Replica, Setting, Snapshot, Volume};

/// What the API server wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// What the object is once everything is filled in.
    Mutate,
    /// Whether it may be so.
    Validate,
}

/// Why a question has no answer.
#[derive(Debug, Error)]
#[error("not an AdmissionReview of admission.k8s.io/v1: {0}")]
pub struct Unreadable(String);

/// What has to be known to answer a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum About {
    /// The settings, and the object itself.
    ItselfAlone,
    /// This volume, and how many snapshots it has.
    Volume(String),
    /// The replicas of this volume, all nodes, and what is promised of their disks.
    RoomFor(String),
    /// This volume, its engine and its replicas, and which disks can be read.
    ReplicasOf(String),
    /// What is on this node, and whether Kubernetes has it.
    Node(String),
}

/// A question.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Review {
    api_version: String,
    request: Request,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Request {
    uid: String,
    operation: Operation,
    resource: Resource,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    object: Value,
    #[serde(default)]
    old_object: Value,
}

#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "UPPERCASE")]
enum Operation {
    Create,
    Update,
    Delete,
    Connect,
}

#[derive(Deserialize)]
struct Resource {
    group: String,
    resource: String,
}

/// One operation of a JSON patch (RFC 6902, 4.1): on a member of an object that is there, add replaces.
#[derive(Serialize)]
struct Add {
    op: &'static str,
    path: String,
    value: Value,
}

impl Review {
    /// Reads a question, given as JSON.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn read(review: &[u8]) -> Result<Self, Unreadable> {
        let review: Self = serde_json::from_slice(review).map_err(|e| Unreadable(e.to_string()))?;
        if review.api_version != "admission.k8s.io/v1" {
            return Err(Unreadable(format!("apiVersion {:?}", review.api_version)));
        }
        Ok(review)
    }

    /// What has to be known for an answer to that call.
    pub fn about(&self, call: Call) -> About {
        let request = &self.request;
        let name = || request.old_object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        let text =
            |object: &Value, field: &str| object["spec"][field].as_str().unwrap_or_default().to_owned();
        match (call, request.operation, request.resource.resource.as_str()) {
            _ if !request.is_about_the_object() => About::ItselfAlone,
            (Call::Validate, Operation::Create, "snapshots") => {
                About::Volume(text(&request.object, "volume"))
            }
            (Call::Validate, Operation::Delete, "replicas") => {
                About::ReplicasOf(text(&request.old_object, "volumeName"))
            }
            (Call::Validate, Operation::Delete, "nodes") => About::Node(name()),
            (Call::Validate, Operation::Update, "volumes")
                if request.object["spec"]["size"] != request.old_object["spec"]["size"] =>
            {
                About::RoomFor(name())
            }
            _ => About::ItselfAlone,
        }
    }

    /// Answers, in JSON. An object that cannot be read as its kind is let through, for the definitions refuse it.
    ///
    /// # Errors
    /// [`Unreadable`]: the answer cannot be written.
    pub fn answer(&self, call: Call, facts: &Facts) -> Result<Value, Unreadable> {
        let request = &self.request;
        let mut response = json!({ "uid": request.uid, "allowed": true });
        match call {
            Call::Mutate => {
                let patch = complete(request, facts);
                if !patch.is_empty() {
                    let text = serde_json::to_vec(&patch).map_err(|e| Unreadable(e.to_string()))?;
                    response["patchType"] = json!("JSONPatch");
                    response["patch"] = json!(ByteString(text));
                }
            }
            Call::Validate => match judge(request, facts) {
                Ok(warnings) if warnings.is_empty() => {}
                Ok(warnings) => response["warnings"] = json!(warnings),
                Err(refusal) => {
                    response["allowed"] = json!(false);
                    // As the API server itself says it of a broken rule, and not 403, which is about rights.
                    let Refusal { reason, text } = refusal;
                    response["status"] = json!({ "code": 422, "reason": reason, "message": text });
                }
            },
        }
        Ok(json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response }))
    }
}

fn complete(request: &Request, facts: &Facts) -> Vec<Add> {
    if !request.is_about_the_object() {
        return Vec::new();
    }
    let is_new = request.operation == Operation::Create;
    match (request.operation, request.resource.resource.as_str()) {
        (Operation::Create | Operation::Update, "volumes") => {
            request.completed::<Volume>(|v| volume::complete(v, is_new, &facts.settings))
        }
        (Operation::Create | Operation::Update, "nodes") => request.completed::<Node>(node::complete),
        (Operation::Create, "snapshots") => request.completed::<Snapshot>(snapshot::complete),
        _ => Vec::new(),
    }
}

fn judge(request: &Request, facts: &Facts) -> Result<Vec<String>, Refusal> {
    if !request.is_about_the_object() {
        return Ok(Vec::new());
    }
    match request.resource.resource.as_str() {
        "volumes" => request.judged::<Volume, _>(|change| volume::judge(change, facts)),
        "nodes" => request.judged::<Node, _>(|change| node::judge(change, facts)),
        "settings" => request.judged::<Setting, _>(setting::judge),
        "snapshots" => request.judged::<Snapshot, _>(|change| snapshot::judge(change, facts)),
        "replicas" => request.judged::<Replica, _>(|change| replica::judge(change, facts)),
        resource => Ok(idle(resource).map(|why| vec![why]).unwrap_or_default()),
    }
}

/// What to know of a kind that is stored, and on which nothing acts: whoever makes one would wait for what never comes.
fn idle(resource: &str) -> Option<String> {
    let what = match resource {
        "recurringjobs" => NO_JOBS,
        "backups" | "backuptargets" | "backupvolumes" | "backupbackingimages" => "backups are not built yet",
        "systembackups" | "systemrestores" => "backups of the system are not built yet",
        "backingimages" | "backingimagedatasources" | "backingimagemanagers" => {
            "backing images are not built yet"
        }
        "sharemanagers" => "shared file systems (RWX) are not built yet",
        "supportbundles" => "support bundles are not built yet",
        _ => return None,
    };
    Some(format!("it is stored and nothing acts on it: {what}"))
}

impl Request {
    /// False for other groups' resources and for a subresource, which the status is.
    fn is_about_the_object(&self) -> bool {
        self.resource.group == "longhorn.io" && self.sub_resource.is_empty()
    }

    /// What has to be added so that the object is as it is when `complete` is done with it.
    fn completed<K>(&self, complete: impl FnOnce(&mut K)) -> Vec<Add>
    where
        K: DeserializeOwned + Serialize + Clone + kube::Resource,
    {
        let Ok(before) = serde_json::from_value::<K>(self.object.clone()) else { return Vec::new() };
        let mut after = before.clone();
        complete(&mut after);
        additions(&before, &after)
    }

    fn judged<K: DeserializeOwned, E: Into<Refusal>>(
        &self,
        judge: impl FnOnce(Change<'_, K>) -> Result<Vec<String>, E>,
    ) -> Result<Vec<String>, Refusal> {
        let read = |value: &Value| serde_json::from_value::<K>(value.clone()).ok();
        let verdict = match self.operation {
            Operation::Create => read(&self.object).map(|new| judge(Change::Create(&new))),
            Operation::Update => read(&self.old_object)
                .zip(read(&self.object))
                .map(|(old, new)| judge(Change::Update { old: &old, new: &new })),
            Operation::Delete => read(&self.old_object).map(|old| judge(Change::Delete(&old))),
            Operation::Connect => None,
        };
        verdict.unwrap_or(Ok(Vec::new())).map_err(Into::into)
    }
}

/// The fields of the spec that differ, each whole, and the labels if they differ. Nothing is ever taken away.
fn additions<K: Serialize + kube::Resource>(before: &K, after: &K) -> Vec<Add> {
    let add = |path: String, value: Value| Add { op: "add", path, value };
    let mut all = Vec::new();
    let labels = |meta: &ObjectMeta| meta.labels.clone().unwrap_or_default();
    if labels(before.meta()) != labels(after.meta()) {
        all.push(add("/metadata/labels".to_owned(), json!(labels(after.meta()))));
    }
    let spec = |object: &K| serde_json::to_value(object).ok().and_then(|v| v.get("spec").cloned());
    let (Some(before), Some(Value::Object(after))) = (spec(before), spec(after)) else { return all };
    for (field, value) in after {
        if before.get(&field) != Some(&value) {
            // No field of ours has a character that a JSON pointer escapes (RFC 6901, 3).
            all.push(add(format!("/spec/{field}"), value));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(call: Call, operation: &str, resource: &str, object: &Value, old: &Value) -> Value {
        let review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": { "uid": "u-1", "operation": operation, "object": object, "oldObject": old,
                "resource": { "group": "longhorn.io", "version": "v1beta2", "resource": resource } },
        });
        let review = Review::read(&serde_json::to_vec(&review).unwrap()).unwrap();
        let answer = review.answer(call, &Facts::default()).unwrap();
        assert_eq!(answer["response"]["uid"], "u-1");
        answer["response"].clone()
    }

    fn object(kind: &str, spec: Value) -> Value {
        json!({ "apiVersion": "longhorn.io/v1beta2", "kind": kind, "metadata": { "name": "demo" }, "spec": spec })
    }

    /// The patch as text, from Base64.
    fn patch(response: &Value) -> Value {
        let ByteString(text) = serde_json::from_value(response["patch"].clone()).unwrap();
        serde_json::from_slice(&text).unwrap()
    }

    #[test]
    fn what_is_left_out_comes_as_a_patch() {
        let bare = object("Volume", json!({ "size": "1" }));
        let response = ask(Call::Mutate, "CREATE", "volumes", &bare, &Value::Null);
        assert_eq!(response["patchType"], "JSONPatch");
        let patch = patch(&response);
        let added = |path: &str| {
            patch.as_array().unwrap().iter().find(|op| op["path"] == path).map(|op| op["value"].clone())
        };
        assert_eq!(added("/spec/size"), Some(json!("2097152")));
        assert_eq!(added("/spec/numberOfReplicas"), Some(json!(3)));
        assert_eq!(added("/spec/quorum"), None, "what does not change is in no patch");
        let whole = object(
            "Volume",
            json!({ "size": "2097152", "numberOfReplicas": 3, "dataLocality": "disabled", "snapshotMaxCount": 250 }),
        );
        assert_eq!(ask(Call::Mutate, "CREATE", "volumes", &whole, &Value::Null)["patch"], Value::Null);
        let snapshot = object("Snapshot", json!({ "volume": "demo" }));
        let response = ask(Call::Mutate, "CREATE", "snapshots", &snapshot, &Value::Null);
        assert_eq!(
            self::patch(&response)[0],
            json!({ "op": "add", "path": "/metadata/labels", "value": { "longhornvolume": "demo" } })
        );
    }

    #[test]
    fn a_snapshot_without_room_is_told_from_one_that_is_wrong() {
        let mut facts = Facts { snapshots: 2, ..Facts::default() };
        facts.volume = serde_json::from_value(object("Volume", json!({ "snapshotMaxCount": 2 }))).ok();
        let review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": { "uid": "u-1", "operation": "CREATE", "oldObject": null,
                "object": object("Snapshot", json!({ "volume": "demo", "createSnapshot": true })),
                "resource": { "group": "longhorn.io", "version": "v1beta2", "resource": "snapshots" } },
        });
        let review = Review::read(&serde_json::to_vec(&review).unwrap()).unwrap();
        let answer = review.answer(Call::Validate, &facts).unwrap();
        let status = &answer["response"]["status"];
        assert_eq!((&status["code"], &status["reason"]), (&json!(422), &json!("TooManySnapshots")));
    }

    #[test]
    fn a_refusal_is_one_of_a_rule() {
        let response = ask(Call::Validate, "CREATE", "volumes", &object("Volume", json!({})), &Value::Null);
        assert_eq!(response["allowed"], false);
        assert_eq!(response["status"]["code"], 422);
        assert!(response["status"]["message"].as_str().unwrap().contains("spec.size"));
        let setting = |value: &str| json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Setting", "metadata": { "name": "backup-compression-method" }, "value": value });
        let response = ask(Call::Validate, "UPDATE", "settings", &setting("gzip"), &setting("lz4"));
        assert_eq!((&response["allowed"], response["warnings"].as_array().unwrap().len()), (&json!(true), 1));
        let response = ask(Call::Validate, "UPDATE", "settings", &setting("brotli"), &setting("lz4"));
        assert_eq!(response["allowed"], false);
    }

    #[test]
    fn whoever_makes_what_nothing_acts_on_is_told_so() {
        for kind in [
            "RecurringJob",
            "Backup",
            "BackupTarget",
            "BackupVolume",
            "BackupBackingImage",
            "SystemBackup",
            "SystemRestore",
            "BackingImage",
            "BackingImageDataSource",
            "BackingImageManager",
            "ShareManager",
            "SupportBundle",
        ] {
            let resource = format!("{}s", kind.to_lowercase());
            let response = ask(Call::Validate, "CREATE", &resource, &object(kind, json!({})), &Value::Null);
            let told = response["warnings"][0].as_str().unwrap_or_default();
            assert!(response["allowed"] == true && told.contains("not built yet"), "{resource}: {response}");
        }
        let response = ask(Call::Validate, "CREATE", "orphans", &object("Orphan", json!({})), &Value::Null);
        assert_eq!((&response["allowed"], &response["warnings"]), (&json!(true), &Value::Null));
    }

    #[test]
    fn what_is_not_ours_or_cannot_be_read_passes() {
        let odd = object("Volume", json!({ "size": "1 GiB" }));
        for call in [Call::Mutate, Call::Validate] {
            let response = ask(call, "CREATE", "volumes", &odd, &Value::Null);
            assert_eq!(
                (&response["allowed"], &response["patch"]),
                (&json!(true), &Value::Null),
                "the schema refuses it"
            );
            assert_eq!(ask(call, "CREATE", "backups", &odd, &Value::Null)["allowed"], true);
        }
    }

    #[test]
    fn only_reviews_are_answered() {
        let wrong: &[&[u8]] = &[b"", b"{}", b"{\"apiVersion\":\"admission.k8s.io/v1beta1\",\"request\":{\"uid\":\"\",\"operation\":\"CREATE\",\"resource\":{\"group\":\"\",\"resource\":\"\"}}}"];
        for body in wrong {
            assert!(Review::read(body).is_err());
        }
    }

    #[test]
    fn what_has_to_be_known_follows_from_the_question() {
        let about = |call, operation: &str, resource: &str| {
            let object =
                json!({ "metadata": { "name": "n1" }, "spec": { "volume": "v", "volumeName": "w" } });
            let review = json!({ "apiVersion": "admission.k8s.io/v1", "request": {
                "uid": "", "operation": operation, "object": object, "oldObject": object,
                "resource": { "group": "longhorn.io", "resource": resource } } });
            Review::read(&serde_json::to_vec(&review).unwrap()).unwrap().about(call)
        };
        let cases = [
            ("CREATE", "snapshots", About::Volume("v".into())),
            ("DELETE", "replicas", About::ReplicasOf("w".into())),
            ("DELETE", "nodes", About::Node("n1".into())),
            ("UPDATE", "volumes", About::ItselfAlone),
        ];
        for (operation, resource, expected) in cases {
            assert_eq!(about(Call::Validate, operation, resource), expected);
            assert_eq!(about(Call::Mutate, operation, resource), About::ItselfAlone);
        }
        let volume = |size: &str| object("Volume", json!({ "size": size }));
        let review = json!({ "apiVersion": "admission.k8s.io/v1", "request": {
            "uid": "", "operation": "UPDATE", "object": volume("2"), "oldObject": volume("1"),
            "resource": { "group": "longhorn.io", "resource": "volumes" } } });
        let review = Review::read(&serde_json::to_vec(&review).unwrap()).unwrap();
        assert_eq!(review.about(Call::Validate), About::RoomFor("demo".into()), "it grows");
    }
}
