//! A question of the API server and its answer: AdmissionReview, `admission.k8s.io/v1` (Kubernetes' reference "Dynamic
//! Admission Control", and `k8s.io/api/admission/v1/types.go`).

use k8s_openapi::ByteString;
use kube::core::ObjectMeta;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use thiserror::Error;

use super::{Change, Verdict, World, node, replica, setting, snapshot, volume};
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

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
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

/// Answers a question, given as JSON, in JSON.
///
/// # Errors
/// [`Unreadable`]; an object that cannot be read as its kind is let through, for the definitions refuse it.
pub fn answer(call: Call, review: &[u8], world: &dyn World) -> Result<Value, Unreadable> {
    let review: Review = serde_json::from_slice(review).map_err(|e| Unreadable(e.to_string()))?;
    if review.api_version != "admission.k8s.io/v1" {
        return Err(Unreadable(format!("apiVersion {:?}", review.api_version)));
    }
    let request = review.request;
    let mut response = json!({ "uid": request.uid, "allowed": true });
    match call {
        Call::Mutate => {
            let patch = complete(&request, world);
            if !patch.is_empty() {
                let text = serde_json::to_vec(&patch).map_err(|e| Unreadable(e.to_string()))?;
                response["patchType"] = json!("JSONPatch");
                response["patch"] = json!(ByteString(text));
            }
        }
        Call::Validate => match judge(&request, world) {
            Ok(warnings) if warnings.is_empty() => {}
            Ok(warnings) => response["warnings"] = json!(warnings),
            Err(refusal) => {
                response["allowed"] = json!(false);
                // As the API server itself says it of a broken rule, and not 403, which is about rights.
                response["status"] = json!({ "code": 422, "reason": "Invalid", "message": refusal });
            }
        },
    }
    Ok(json!({ "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response }))
}

fn complete(request: &Request, world: &dyn World) -> Vec<Add> {
    if !request.is_about_the_object() {
        return Vec::new();
    }
    let is_new = request.operation == Operation::Create;
    match (request.operation, request.resource.resource.as_str()) {
        (Operation::Create | Operation::Update, "volumes") => {
            request.completed::<Volume>(|v| volume::complete(v, is_new, &world.settings()))
        }
        (Operation::Create | Operation::Update, "nodes") => request.completed::<Node>(node::complete),
        (Operation::Create, "snapshots") => request.completed::<Snapshot>(snapshot::complete),
        _ => Vec::new(),
    }
}

fn judge(request: &Request, world: &dyn World) -> Verdict {
    if !request.is_about_the_object() {
        return Ok(Vec::new());
    }
    match request.resource.resource.as_str() {
        "volumes" => request.judged::<Volume>(volume::judge),
        "nodes" => request.judged::<Node>(|change| node::judge(change, world)),
        "settings" => request.judged::<Setting>(setting::judge),
        "snapshots" => request.judged::<Snapshot>(|change| snapshot::judge(change, world)),
        "replicas" => request.judged::<Replica>(|change| replica::judge(change, world)),
        _ => Ok(Vec::new()),
    }
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

    fn judged<K: DeserializeOwned>(&self, judge: impl FnOnce(Change<'_, K>) -> Verdict) -> Verdict {
        let read = |value: &Value| serde_json::from_value::<K>(value.clone()).ok();
        let verdict = match self.operation {
            Operation::Create => read(&self.object).map(|new| judge(Change::Create(&new))),
            Operation::Update => read(&self.old_object)
                .zip(read(&self.object))
                .map(|(old, new)| judge(Change::Update { old: &old, new: &new })),
            Operation::Delete => read(&self.old_object).map(|old| judge(Change::Delete(&old))),
            Operation::Connect => None,
        };
        verdict.unwrap_or(Ok(Vec::new()))
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
pub(super) mod tests {
    use std::sync::Arc;

    use kube::ResourceExt;

    use super::*;
    use crate::api::Engine;
    use crate::settings::Settings;

    /// What a test says is known.
    #[derive(Default)]
    pub(in crate::admission) struct Known {
        pub(in crate::admission) volumes: Vec<Arc<Volume>>,
        pub(in crate::admission) engines: Vec<Arc<Engine>>,
        pub(in crate::admission) replicas: Vec<Arc<Replica>>,
        pub(in crate::admission) snapshots: usize,
        pub(in crate::admission) kubernetes: Vec<String>,
    }

    impl World for Known {
        fn settings(&self) -> Settings {
            Settings::default()
        }

        fn volume(&self, name: &str) -> Option<Arc<Volume>> {
            self.volumes.iter().find(|v| v.name_any() == name).cloned()
        }

        fn engine(&self, volume: &str) -> Option<Arc<Engine>> {
            self.engines.iter().find(|e| e.spec.volume_name == volume).cloned()
        }

        fn replicas_of(&self, volume: &str) -> Vec<Arc<Replica>> {
            self.replicas.iter().filter(|r| r.spec.volume_name == volume).cloned().collect()
        }

        fn replicas_on(&self, node: &str) -> Vec<Arc<Replica>> {
            self.replicas.iter().filter(|r| r.spec.node_id == node).cloned().collect()
        }

        fn snapshots_of(&self, _: &str) -> usize {
            self.snapshots
        }

        fn kubernetes_has(&self, node: &str) -> bool {
            self.kubernetes.iter().any(|n| n == node)
        }
    }

    fn ask(call: Call, operation: &str, resource: &str, object: &Value, old: &Value) -> Value {
        let review = json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "request": { "uid": "u-1", "operation": operation, "object": object, "oldObject": old,
                "resource": { "group": "longhorn.io", "version": "v1beta2", "resource": resource } },
        });
        let answer = answer(call, &serde_json::to_vec(&review).unwrap(), &Known::default()).unwrap();
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
    fn a_refusal_is_one_of_a_rule() {
        let response = ask(Call::Validate, "CREATE", "volumes", &object("Volume", json!({})), &Value::Null);
        assert_eq!(response["allowed"], false);
        assert_eq!(response["status"]["code"], 422);
        assert!(response["status"]["message"].as_str().unwrap().contains("spec.size"));
        let setting = |value: &str| json!({ "apiVersion": "longhorn.io/v1beta2", "kind": "Setting", "metadata": { "name": "log-level" }, "value": value });
        let response = ask(Call::Validate, "UPDATE", "settings", &setting("Debug"), &setting("Info"));
        assert_eq!((&response["allowed"], response["warnings"].as_array().unwrap().len()), (&json!(true), 1));
        let response = ask(Call::Validate, "UPDATE", "settings", &setting("Loud"), &setting("Info"));
        assert_eq!(response["allowed"], false);
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
            assert!(answer(Call::Validate, body, &Known::default()).is_err());
        }
    }
}
