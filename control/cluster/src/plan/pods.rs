//! Pods that do not help themselves. On a node that is down they are stuck: Kubernetes makes them anew elsewhere once they are
//! gone, and waits for their node until somebody says otherwise. And where a volume's device was lost under them, what they
//! have mounted is dead until they begin anew.
//!
//! What a pod on a silent node may still be doing does no harm to a volume: the next engine's generation shuts the old
//! one out (`docs/invariants.md`, 2).

use k8s_openapi::api::core::v1::{Pod, Volume};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;

use crate::settings::{NodeDown, Remount};

impl NodeDown {
    fn takes(self, pod: &Pod) -> bool {
        match owner(pod) {
            Some("StatefulSet") => self.stateful_sets,
            Some("ReplicaSet") => self.deployments,
            _ => false,
        }
    }
}

/// A claim of a volume of this driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// What holds its volume on the node; `None`: nothing does.
    pub held: Option<Held>,
}

/// Kubernetes' VolumeAttachment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Its name.
    pub by: String,
    /// It is being deleted already.
    pub goes: bool,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Delete Kubernetes' VolumeAttachment of that name: the volume leaves the node.
    Detach(String),
    /// Delete a pod without waiting for its node.
    Force(PodName),
}

/// Which pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodName {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID: another pod of the name is left alone.
    pub uid: String,
}

impl PodName {
    fn of(pod: &Pod) -> Self {
        let meta = &pod.metadata;
        Self {
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
        }
    }
}

/// What made the pod, and makes it anew.
fn controller(pod: &Pod) -> Option<&OwnerReference> {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().find(|o| o.controller == Some(true))
}

fn owner(pod: &Pod) -> Option<&str> {
    controller(pod).map(|o| o.kind.as_str())
}

/// True if the pod mounts that claim of its namespace.
fn mounts(pod: &Pod, namespace: &str, claim: &str) -> bool {
    let volumes = pod.spec.as_ref().and_then(|s| s.volumes.as_deref()).unwrap_or_default();
    let of_pod = |name: &str| format!("{}-{name}", pod.metadata.name.as_deref().unwrap_or_default());
    // The claim of an ephemeral volume is named after its pod.
    let is_claim = |v: &Volume| match &v.persistent_volume_claim {
        Some(source) => source.claim_name == claim,
        None => v.ephemeral.is_some() && of_pod(&v.name) == claim,
    };
    pod.metadata.namespace.as_deref() == Some(namespace) && volumes.iter().any(is_claim)
}

/// True if the pod mounts one of the claims, and has not ended.
pub fn uses(pod: &Pod, claims: &[Claim]) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref()).unwrap_or_default();
    !matches!(phase, "Succeeded" | "Failed") && claims.iter().any(|c| mounts(pod, &c.namespace, &c.name))
}

/// What a volume whose device was lost at some time means for a pod of its node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Nothing.
    Stays,
    /// It goes already.
    Goes,
    /// It has to begin anew.
    Delete(PodName),
}

/// What happens to a pod that mounts one of the volume's claims. One that began afterwards has the new device; one that nobody
/// makes anew is its user's.
pub fn after_loss(pod: &Pod, claims: &[Claim], lost: Timestamp, policy: &Remount) -> Fate {
    let began = pod.status.as_ref().and_then(|s| s.start_time.as_ref());
    // The kubelet's clock may be behind: it would be deleted again and again.
    let is_new = pod.metadata.creation_timestamp.as_ref().is_some_and(|made| made.0 >= lost);
    let is_older = began.is_some_and(|began| began.0 < lost) && !is_new;
    if !is_older || !claims.iter().any(|c| mounts(pod, &c.namespace, &c.name)) {
        return Fate::Stays;
    }
    let Some(owner) = controller(pod) else { return Fate::Stays };
    let group = owner.api_version.split_once('/').map_or("", |(group, _)| group);
    if policy.spared.contains(&format!("{group}/{}", owner.kind)) {
        return Fate::Stays;
    }
    match &pod.metadata.deletion_timestamp {
        Some(_) => Fate::Goes,
        None => Fate::Delete(PodName::of(pod)),
    }
}

/// Pods of a node that is down that Kubernetes itself gave up: they are being deleted, their time is over, and nobody there is
/// left to end them.
pub fn stuck(pods: &[Pod], policy: NodeDown, now: Timestamp) -> impl Iterator<Item = &Pod> {
    pods.iter().filter(move |pod| {
        let due = pod.metadata.deletion_timestamp.as_ref();
        policy.takes(pod) && due.is_some_and(|due| due.0 <= now)
    })
}

/// Frees stuck pods that mount volumes of this driver: first these leave the node, then the pods go. Other pods are not ours
/// to free.
pub fn leave<'a>(stuck: impl IntoIterator<Item = &'a Pod>, claims: &[Claim]) -> Vec<Action> {
    let mut actions = Vec::new();
    for pod in stuck {
        let mounted: Vec<&Claim> = claims.iter().filter(|c| mounts(pod, &c.namespace, &c.name)).collect();
        let held = mounted.iter().filter_map(|c| c.held.as_ref());
        actions.extend(held.clone().filter(|h| !h.goes).map(|h| Action::Detach(h.by.clone())));
        if !mounted.is_empty() && held.count() == 0 {
            actions.push(Action::Force(PodName::of(pod)));
        }
    }
    actions
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{
        EphemeralVolumeSource, PersistentVolumeClaimVolumeSource, PodSpec, PodStatus,
    };
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use kube::api::ObjectMeta;

    use super::*;

    const NOW: i64 = 1_700_000_000;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(NOW + seconds).unwrap()
    }

    /// A pod of namespace `apps`, which mounts the claim `data` and an ephemeral volume, `scratch`.
    fn pod(owner: &str, deleted: Option<i64>) -> Pod {
        let owners = (!owner.is_empty()).then(|| {
            vec![OwnerReference {
                api_version: "apps/v1".into(),
                kind: owner.into(),
                controller: Some(true),
                ..OwnerReference::default()
            }]
        });
        let claim = PersistentVolumeClaimVolumeSource { claim_name: "data".into(), ..Default::default() };
        let volume = Volume { persistent_volume_claim: Some(claim), ..Volume::default() };
        let ephemeral = Some(EphemeralVolumeSource::default());
        let scratch = Volume { name: "scratch".into(), ephemeral, ..Volume::default() };
        Pod {
            metadata: ObjectMeta {
                namespace: Some("apps".into()),
                name: Some("p".into()),
                uid: Some("u".into()),
                owner_references: owners,
                deletion_timestamp: deleted.map(|s| Time(at(s))),
                ..ObjectMeta::default()
            },
            spec: Some(PodSpec { volumes: Some(vec![volume, scratch]), ..PodSpec::default() }),
            ..Pod::default()
        }
    }

    fn name() -> PodName {
        PodName { namespace: "apps".into(), name: "p".into(), uid: "u".into() }
    }

    fn claim(name: &str, held: Option<bool>) -> Claim {
        let held = held.map(|goes| Held { by: format!("csi-{name}"), goes });
        Claim { namespace: "apps".into(), name: name.into(), held }
    }

    #[test]
    fn a_pod_mounts_the_claims_that_it_names_and_those_made_for_it() {
        let mounts = |namespace: &str, claim: &str| mounts(&pod("Job", None), namespace, claim);
        assert!(mounts("apps", "data") && mounts("apps", "p-scratch"));
        assert!(!mounts("apps", "scratch") && !mounts("apps", "p-data") && !mounts("other", "p-scratch"));
    }

    #[test]
    fn a_pod_that_has_ended_uses_nothing() {
        let phases =
            [("", true), ("Pending", true), ("Running", true), ("Succeeded", false), ("Failed", false)];
        for (phase, expected) in phases {
            let status = PodStatus { phase: Some(phase.to_owned()), ..PodStatus::default() };
            let pod = Pod { status: Some(status), ..pod("Job", None) };
            assert_eq!(uses(&pod, &[claim("data", None)]), expected, "{phase}");
            assert!(!uses(&pod, &[claim("other", None)]), "{phase}");
        }
    }

    #[test]
    fn a_stuck_pod_goes_after_its_volumes_have_left_the_node() {
        let stuck = pod("StatefulSet", Some(0));
        let cases = [
            (vec![claim("data", Some(false))], vec![Action::Detach("csi-data".into())]),
            (vec![claim("data", Some(true))], vec![]),
            (vec![claim("data", None), claim("other", Some(false))], vec![Action::Force(name())]),
            (vec![claim("other", None)], vec![]),
        ];
        for (claims, expected) in cases {
            assert_eq!(leave([&stuck], &claims), expected, "{claims:?}");
        }
    }

    #[test]
    fn only_pods_that_kubernetes_gave_up_and_the_policy_names_are_stuck() {
        let (sets, deployments) = (
            NodeDown { stateful_sets: true, deployments: false },
            NodeDown { stateful_sets: false, deployments: true },
        );
        let cases = [
            ("not being deleted", pod("StatefulSet", None), sets, false),
            ("its time is not over", pod("StatefulSet", Some(1)), sets, false),
            ("of a StatefulSet", pod("StatefulSet", Some(0)), sets, true),
            ("of a Deployment", pod("ReplicaSet", Some(-60)), deployments, true),
            ("not that policy", pod("ReplicaSet", Some(-60)), sets, false),
            ("nobody makes it anew", pod("", Some(-60)), deployments, false),
            ("nothing is set", pod("StatefulSet", Some(-60)), NodeDown::default(), false),
        ];
        for (what, pod, policy, is_stuck) in cases {
            assert_eq!(stuck(&[pod], policy, at(0)).next().is_some(), is_stuck, "{what}");
        }
    }

    #[test]
    fn pods_that_had_a_lost_device_begin_anew_if_somebody_makes_them_anew() {
        let began = |owner: &str, deleted, seconds: Option<i64>| {
            let status = PodStatus { start_time: seconds.map(|s| Time(at(s))), ..PodStatus::default() };
            Pod { status: Some(status), ..pod(owner, deleted) }
        };
        let spared = |kinds: &[&str]| Remount { spared: kinds.iter().map(|k| (*k).to_owned()).collect() };
        let ours = || vec![claim("data", None)];
        let none = spared(&[]);
        let mut late = began("StatefulSet", None, Some(-1));
        late.metadata.creation_timestamp = Some(Time(at(1)));
        let cases = [
            ("made since, on a node whose clock is behind", late, ours(), none.clone(), Fate::Stays),
            ("older", began("StatefulSet", None, Some(-1)), ours(), none.clone(), Fate::Delete(name())),
            ("any owner", began("DaemonSet", None, Some(-1)), ours(), none.clone(), Fate::Delete(name())),
            ("goes already", began("ReplicaSet", Some(5), Some(-1)), ours(), none.clone(), Fate::Goes),
            ("younger", began("StatefulSet", None, Some(0)), ours(), none.clone(), Fate::Stays),
            ("not begun", began("StatefulSet", None, None), ours(), none.clone(), Fate::Stays),
            ("nobody's", began("", None, Some(-1)), ours(), none.clone(), Fate::Stays),
            (
                "another claim",
                began("StatefulSet", None, Some(-1)),
                vec![claim("x", None)],
                none,
                Fate::Stays,
            ),
            (
                "spared",
                began("StatefulSet", None, Some(-1)),
                ours(),
                spared(&["apps/StatefulSet"]),
                Fate::Stays,
            ),
            (
                "another kind is spared",
                began("StatefulSet", None, Some(-1)),
                ours(),
                spared(&["batch/Job"]),
                Fate::Delete(name()),
            ),
        ];
        for (what, pod, claims, policy, expected) in cases {
            assert_eq!(after_loss(&pod, &claims, at(0), &policy), expected, "{what}");
        }
    }
}
