//! The pod that runs a node's engines and replicas: made from a template, and replaced only when nothing runs in it.
//!
//! It names its node, so that no scheduler is asked and a cordon does not keep it away: this decision does. Its end is the
//! end of every process in it.

use k8s_openapi::api::core::v1::{Pod, PodTemplate};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::ObjectMeta;

/// The name of the template in the managers' namespace.
pub const TEMPLATE: &str = "longhorn-instance-manager";

/// The labels by which a disruption budget finds the pod.
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";
/// The value of [`COMPONENT_LABEL`].
pub const COMPONENT: &str = "instance-manager";
/// The label with the node's name; Longhorn's.
pub const NODE_LABEL: &str = "longhorn.io/node";

/// The annotation that tells which template the pod was made from.
const MADE_FROM: &str = "longhorn.io/template-hash";

/// Who runs a node's instance manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RunBy {
    /// Somebody else: it is there, or comes.
    #[default]
    Others,
    /// The manager makes a pod for it.
    Pod,
}

/// A node, its pod, and what the pod should be.
#[derive(Clone, Debug)]
pub struct Observed<'a> {
    /// The name of the instance manager, and of its pod.
    pub name: &'a str,
    /// The node.
    pub node: &'a str,
    /// The node is cordoned, or Kubernetes does not know it.
    pub cordoned: bool,
    /// The template; `None`: there is none.
    pub template: Option<&'a PodTemplate>,
    /// The pod.
    pub pod: Option<&'a Pod>,
    /// The resource that owns it; `None`: it is not there yet.
    pub owner: Option<OwnerReference>,
    /// No engine and no replica runs on the node, or should.
    pub idle: bool,
}

/// What to do.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Make the pod.
    Create(Box<Pod>),
    /// Remove it: it has ended, or another one is to take its place.
    Delete,
}

/// Decides for one node.
pub fn plan(o: &Observed<'_>) -> Option<Action> {
    let template = o.template?;
    let Some(pod) = o.pod else {
        // On a node that is being drained it would have to be evicted again and again; and kubectl drain stops at a pod
        // that has no owner, since nobody seems to make it anew.
        let may_be = !o.cordoned && o.owner.is_some();
        return may_be.then(|| Action::Create(Box::new(pod_of(o, template))));
    };
    if pod.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    let made_from = pod.metadata.annotations.as_ref().and_then(|all| all.get(MADE_FROM));
    let is_old = made_from != Some(&hash(template));
    let has_ended = matches!(phase, Some("Failed" | "Succeeded"));
    (has_ended || is_old && o.idle && !o.cordoned).then_some(Action::Delete)
}

fn pod_of(o: &Observed<'_>, template: &PodTemplate) -> Pod {
    let made_from = template.template.clone().unwrap_or_default();
    let given = made_from.metadata.unwrap_or_default();
    let mut labels = given.labels.unwrap_or_default();
    labels.insert(COMPONENT_LABEL.to_owned(), COMPONENT.to_owned());
    labels.insert(NODE_LABEL.to_owned(), o.node.to_owned());
    let mut annotations = given.annotations.unwrap_or_default();
    annotations.insert(MADE_FROM.to_owned(), hash(template));
    let mut spec = made_from.spec.unwrap_or_default();
    spec.node_name = Some(o.node.to_owned());
    let metadata = ObjectMeta {
        name: Some(o.name.to_owned()),
        labels: Some(labels),
        annotations: Some(annotations),
        owner_references: o.owner.clone().map(|owner| vec![owner]),
        ..ObjectMeta::default()
    };
    Pod { metadata, spec: Some(spec), status: None }
}

/// The same for the same template, also by another version of this program: the next manager finds the pods of the one before.
fn hash(template: &PodTemplate) -> String {
    let text = serde_json::to_string(&template.template).unwrap_or_default();
    format!("{:016x}", lh_block::fnv1a(text.bytes()))
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::{Container, PodSpec, PodStatus, PodTemplateSpec};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    use super::*;

    fn template(image: &str) -> PodTemplate {
        let container = Container { image: Some(image.into()), ..Container::default() };
        let spec = PodSpec { containers: vec![container], host_network: Some(true), ..PodSpec::default() };
        let template = PodTemplateSpec { metadata: None, spec: Some(spec) };
        PodTemplate { template: Some(template), ..PodTemplate::default() }
    }

    fn observed<'a>(template: &'a PodTemplate, pod: Option<&'a Pod>) -> Observed<'a> {
        Observed {
            name: "instance-manager-n1",
            node: "n1",
            cordoned: false,
            template: Some(template),
            pod,
            owner: Some(OwnerReference { controller: Some(true), ..OwnerReference::default() }),
            idle: false,
        }
    }

    fn made(template: &PodTemplate) -> Pod {
        match plan(&observed(template, None)) {
            Some(Action::Create(pod)) => *pod,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_pod_is_the_template_on_its_node() {
        let template = template("a");
        let pod = made(&template);
        let spec = pod.spec.as_ref().unwrap();
        assert_eq!((spec.node_name.as_deref(), spec.host_network), (Some("n1"), Some(true)));
        assert_eq!(spec.containers[0].image.as_deref(), Some("a"));
        let labels = pod.metadata.labels.as_ref().unwrap();
        assert_eq!((&*labels[COMPONENT_LABEL], &*labels[NODE_LABEL]), ("instance-manager", "n1"));
        // kubectl drain evicts only what somebody makes anew.
        assert_eq!(pod.metadata.owner_references.as_ref().unwrap()[0].controller, Some(true));
        assert_eq!(plan(&observed(&template, Some(&pod))), None, "at rest nothing is done");
    }

    /// A manager of another version finds the pods of the one before, and replaces those of another template alone.
    #[test]
    fn the_mark_of_a_template_is_the_same_for_ever() {
        assert_eq!(hash(&template("a")), "d777ef19701d511d");
    }

    #[test]
    fn none_is_made_without_template_or_owner_or_on_a_cordoned_node() {
        let template = template("a");
        assert_eq!(plan(&Observed { cordoned: true, ..observed(&template, None) }), None);
        assert_eq!(plan(&Observed { template: None, ..observed(&template, None) }), None);
        assert_eq!(plan(&Observed { owner: None, ..observed(&template, None) }), None);
    }

    #[test]
    fn it_is_replaced_when_it_ended_or_when_it_is_old_and_nothing_runs_in_it() {
        let (old, new) = (template("a"), template("b"));
        let pod = made(&old);
        let with = |phase: &str| {
            let status = PodStatus { phase: Some(phase.into()), ..PodStatus::default() };
            Pod { status: Some(status), ..pod.clone() }
        };
        let (runs, failed) = (with("Running"), with("Failed"));
        let idle = |template, pod, idle| plan(&Observed { idle, ..observed(template, Some(pod)) });
        assert_eq!(idle(&old, &failed, false), Some(Action::Delete));
        assert_eq!(idle(&new, &runs, false), None, "its processes would end with it");
        assert_eq!(idle(&new, &runs, true), Some(Action::Delete));
        assert_eq!(idle(&old, &runs, true), None);
        let mut goes = failed.clone();
        goes.metadata.deletion_timestamp = Some(Time(Timestamp::from_second(1).unwrap()));
        assert_eq!(idle(&old, &goes, true), None);
    }
}
