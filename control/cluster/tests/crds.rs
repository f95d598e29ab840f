//! The resource definitions beside Longhorn's own: every kind, field, type, word, short name and column of 1.12.1
//! (`fixtures/`), and what is added to them. `deploy/crds.yaml` is made of the same types; `UPDATE_GOLDEN=1` writes it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::core::cel::{validate_cel, validate_cel_update};
use lh_cluster::api::{self, Int64Text};
use serde_json::{Value, json};

const KINDS: &str = include_str!("fixtures/longhorn-crd-kinds.tsv");
const FIELDS: &str = include_str!("fixtures/longhorn-crd-fields.tsv");

/// Kinds that only Longhorn's v2 data engine uses.
const LEFT_OUT: &[&str] = &["EngineFrontend", "Shard", "ShardGroup"];

/// Fields that Longhorn does not have.
const ADDED: &[(&str, &str)] = &[
    ("Engine", "spec.ioTimeout"),
    ("Engine", "spec.migratable"),
    ("Engine", "spec.quorum"),
    ("Engine", "spec.relayFrom"),
    ("Engine", "status.device"),
    ("Engine", "status.deviceLostAt"),
    ("Engine", "status.failedImage"),
    ("Engine", "status.generation"),
    ("Engine", "status.relayAddress"),
    ("Engine", "status.relaying"),
    ("Engine", "status.replicaReasons"),
    ("Engine", "status.replicaReasons.{}"),
    ("Engine", "status.stay"),
    ("Engine", "status.waitingFor"),
    ("Replica", "spec.cloneFrom"),
    ("Replica", "spec.cloneFrom.directory"),
    ("Replica", "spec.cloneFrom.snapshot"),
    ("Replica", "status.address"),
    ("Replica", "status.epochRecorded"),
    ("Replica", "status.failedImage"),
    ("Replica", "status.generation"),
    ("Replica", "status.mapKey"),
    ("Volume", "spec.ioTimeout"),
    ("Volume", "spec.quorum"),
    ("Volume", "status.dataRemovedOf"),
    ("Volume", "status.epoch"),
    ("Volume", "status.epoch.counter"),
    ("Volume", "status.epoch.generation"),
    ("Volume", "status.epoch.id"),
    ("Volume", "status.epoch.members"),
    ("Volume", "status.evictionAttempts"),
    ("Volume", "status.generation"),
];

fn definitions() -> BTreeMap<String, CustomResourceDefinition> {
    api::definitions().into_iter().map(|d| (d.spec.names.kind.clone(), d)).collect()
}

fn rows(table: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    table.lines().skip(1).map(|line| line.split('\t').collect())
}

#[test]
fn kinds_short_names_and_columns_are_longhorns() {
    let ours = definitions();
    let mut seen = BTreeSet::new();
    for row in rows(KINDS) {
        let [kind, plural, short, scope, subresource, columns] = row[..] else { panic!("{row:?}") };
        if LEFT_OUT.contains(&kind) {
            assert!(!ours.contains_key(kind), "{kind}");
            continue;
        }
        seen.insert(kind.to_owned());
        let crd = ours.get(kind).unwrap_or_else(|| panic!("no {kind}"));
        let names = &crd.spec.names;
        assert_eq!(crd.metadata.name.as_deref(), Some(format!("{plural}.longhorn.io").as_str()));
        assert_eq!(names.short_names.clone().unwrap_or_default(), [short], "{kind}");
        assert_eq!(crd.spec.scope, scope, "{kind}");
        let [version] = &crd.spec.versions[..] else { panic!("{kind} has several versions") };
        assert_eq!(version.name, "v1beta2");
        let subresources = version.subresources.as_ref().expect("subresources");
        assert_eq!(subresources.status.is_some(), subresource == "status", "{kind}");
        let printed: Vec<String> = version
            .additional_printer_columns
            .as_ref()
            .map_or_else(Vec::new, |all| all.iter().map(|c| format!("{}={}", c.name, c.json_path)).collect());
        // Longhorn's column reads a condition that no volume has, and is empty.
        let mistaken = "Scheduled=.status.conditions[?(@.type=='Schedulable')].status";
        let meant = "Scheduled=.status.conditions[?(@.type=='Scheduled')].status";
        assert_eq!(printed.join("; "), columns.replace(mistaken, meant), "{kind}");
    }
    assert_eq!(ours.into_keys().collect::<BTreeSet<_>>(), seen);
}

/// What a schema says of one field.
#[derive(Debug)]
struct Field {
    kind: String,
    format: String,
    words: Option<BTreeSet<String>>,
    nullable: bool,
    items: String,
    default: Option<Value>,
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn walk(schema: &Value, path: &str, into: &mut BTreeMap<String, Field>) {
    assert!(
        schema.get("$ref").is_none() && schema.get("anyOf").is_none(),
        "{path} is not structural: {schema}"
    );
    let words = schema["enum"].as_array().map(|all| all.iter().map(text).collect());
    let field = Field {
        kind: text(&schema["type"]),
        format: text(&schema["format"]),
        words,
        nullable: schema["nullable"] == true,
        items: text(&schema["items"]["type"]),
        default: schema.get("default").cloned(),
    };
    assert!(!field.kind.is_empty(), "{path} has no type: {schema}");
    into.insert(path.to_owned(), field);
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        walk(inner, &path, into);
    }
    if schema["additionalProperties"].is_object() {
        walk(&schema["additionalProperties"], &format!("{path}.{{}}"), into);
    }
    if schema["items"]["type"] == "object" {
        walk(&schema["items"], &format!("{path}[]"), into);
    }
}

fn fields_of(crd: &CustomResourceDefinition) -> BTreeMap<String, Field> {
    let schema = crd.spec.versions[0].schema.as_ref().and_then(|s| s.open_api_v3_schema.as_ref());
    let mut fields = BTreeMap::new();
    walk(&serde_json::to_value(schema.expect("a schema")).unwrap(), "", &mut fields);
    fields.remove("");
    fields
}

/// What is wrong with our field where Longhorn's is of that type; empty if nothing is.
fn difference(ours: &Field, theirs: &str) -> String {
    let mut wrong = String::new();
    let base = theirs.split(' ').next().unwrap_or_default();
    if ours.kind != base {
        let _ = write!(wrong, "is {}; ", ours.kind);
    }
    for format in ["int64", "date-time"] {
        if base == "string" && theirs.contains(format) && ours.format != format {
            let _ = write!(wrong, "has the format {:?}; ", ours.format);
        }
    }
    if let Some((_, items)) = theirs.split_once(" of ")
        && ours.items != items
    {
        let _ = write!(wrong, "has items {}; ", ours.items);
    }
    if theirs.contains("nullable") && !ours.nullable {
        wrong.push_str("refuses null; ");
    }
    let words = theirs.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(words, _)| words);
    match (&ours.words, words) {
        (Some(ours), Some(theirs)) => {
            for word in theirs.split('|').filter(|word| !ours.contains(*word)) {
                let _ = write!(wrong, "refuses {word:?}; ");
            }
        }
        (Some(ours), None) => {
            let _ = write!(wrong, "takes only {ours:?}; ");
        }
        (None, Some(_)) => wrong.push_str("takes any word; "),
        (None, None) => {}
    }
    if let Some((_, default)) = theirs.split_once("default=")
        && ours.default != Some(default.into())
    {
        let _ = write!(wrong, "has the default {:?}; ", ours.default);
    }
    wrong
}

#[test]
fn fields_are_longhorns_and_the_added_ones_are_known() {
    let ours = definitions();
    let mut left: BTreeMap<&str, BTreeMap<String, Field>> =
        ours.iter().map(|(kind, crd)| (kind.as_str(), fields_of(crd))).collect();
    let mut wrong = Vec::new();
    for row in rows(FIELDS) {
        let [kind, field, theirs] = row[..] else { panic!("{row:?}") };
        if LEFT_OUT.contains(&kind) {
            continue;
        }
        match left.get_mut(kind).and_then(|fields| fields.remove(field)) {
            None => wrong.push(format!("{kind} {field} is missing")),
            Some(ours) => match difference(&ours, theirs).as_str() {
                "" => {}
                difference => wrong.push(format!("{kind} {field} ({theirs}) {difference}")),
            },
        }
    }
    let standard = ["apiVersion", "kind", "metadata"];
    let added: Vec<(&str, String)> = left
        .into_iter()
        .flat_map(|(kind, fields)| fields.into_keys().map(move |f| (kind, f)))
        .filter(|(_, field)| !standard.contains(&field.as_str()))
        .collect();
    let added: Vec<(&str, &str)> = added.iter().map(|(k, f)| (*k, f.as_str())).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!(added, ADDED);
}

#[test]
fn what_a_user_may_leave_out_has_a_default() {
    let ours = definitions();
    let default = |kind: &str, field: &str| fields_of(&ours[kind])[field].default.clone();
    for (kind, field, value) in [
        ("Volume", "spec.frontend", Value::from("blockdev")),
        ("Volume", "spec.accessMode", "rwo".into()),
        ("Volume", "spec.dataEngine", "v1".into()),
        ("Volume", "spec.quorum", "any".into()),
        ("Volume", "spec.ioTimeout", 300.into()),
        ("Volume", "spec.replicaSoftAntiAffinity", "ignored".into()),
        ("Node", "spec.disks.{}.diskType", "filesystem".into()),
    ] {
        assert_eq!(default(kind, field), Some(value), "{kind} {field}");
    }
    // What a setting decides must stay absent.
    for (kind, field) in [("Volume", "spec.numberOfReplicas"), ("Volume", "spec.dataLocality")] {
        assert_eq!(default(kind, field), None, "{kind} {field}");
    }
}

#[test]
fn deploy_crds_yaml_is_fresh() {
    let mut fresh = String::from(
        "# Made of the types in control/cluster/src/api by UPDATE_GOLDEN=1 cargo test -p lh-cluster --test crds\n",
    );
    for crd in api::definitions() {
        let _ = write!(fresh, "---\n{}", serde_saphyr::to_string(&crd).unwrap());
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/crds.yaml");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &fresh).unwrap();
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(stored == fresh, "deploy/crds.yaml is not what the types say: write it with UPDATE_GOLDEN=1");
}

fn volume(change: impl Fn(&mut api::VolumeSpec)) -> api::Volume {
    let mut spec = api::VolumeSpec { size: Int64Text(1 << 30), number_of_replicas: 3, ..Default::default() };
    change(&mut spec);
    api::Volume::new("demo", spec)
}

/// A change of a good specification, and a part of what is said of it.
type Case = (fn(&mut api::VolumeSpec), &'static str);

#[test]
fn impossible_volumes_are_refused() {
    validate_cel(&volume(|_| {})).unwrap();
    validate_cel(&volume(|v| (v.data_locality, v.number_of_replicas) = (api::DataLocality::StrictLocal, 1)))
        .unwrap();
    let cases: &[Case] = &[
        (|v| v.data_locality = api::DataLocality::StrictLocal, "exactly one replica"),
        (
            |v| (v.data_locality, v.number_of_replicas) = (api::DataLocality::StrictLocal, 0),
            "exactly one replica",
        ),
        (|v| v.migratable = true, "only rwx"),
        (|v| v.size = Int64Text(-1), "number of bytes"),
    ];
    for (change, says) in cases {
        let refused = validate_cel(&volume(change)).unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
    }
}

#[test]
fn impossible_changes_are_refused() {
    let old = volume(|_| {});
    validate_cel_update(&volume(|v| v.size = Int64Text(2 << 30)), &old).unwrap();
    validate_cel_update(&volume(|v| v.number_of_replicas = 1), &old).unwrap();
    let cases: &[Case] = &[
        (|v| v.size = Int64Text((1 << 30) - 1), "does not shrink"),
        // Left out it could be written anew, as small as anybody likes, and clones would be as small as that.
        (|v| v.size = Int64Text::default(), "does not shrink"),
        (|v| v.data_engine = api::DataEngine::V2, "data engine"),
        (|v| v.quorum = api::Quorum::Majority, "quorum"),
    ];
    for (change, says) in cases {
        let refused = validate_cel_update(&volume(change), &old).unwrap_err().to_string();
        assert!(refused.contains(says), "{refused}");
    }
    let replica = |volume: &str| {
        let spec = api::ReplicaSpec { volume_name: volume.into(), ..Default::default() };
        api::Replica::new("demo-r-1", spec)
    };
    validate_cel_update(&replica("a"), &replica("")).unwrap();
    assert!(validate_cel_update(&replica("b"), &replica("a")).is_err());
    assert!(validate_cel_update(&replica(""), &replica("a")).is_err());
}

#[test]
fn what_go_writes_is_read() {
    let json = r#"{"apiVersion":"longhorn.io/v1beta2","kind":"Engine","metadata":{"name":"demo-e-0"},
        "spec":{"volumeName":"demo","volumeSize":"1073741824","nodeID":"","desireState":"stopped","frontend":"",
            "replicaAddressMap":{}},
        "status":{"currentState":"stopped","currentSize":"0","conditions":null,"replicaModeMap":null,
            "snapshots":{"a":{"name":"a","parent":"","children":null,"usercreated":true,"size":"4096"}}}}"#;
    let engine: api::Engine = serde_json::from_str(json).unwrap();
    assert_eq!(engine.spec.frontend, api::Frontend::None);
    assert_eq!(engine.spec.volume_size, Int64Text(1 << 30));
    let status = engine.status.unwrap();
    assert!(status.conditions.is_empty() && status.snapshots["a"].user_created);
}

#[test]
fn a_quorum_that_nobody_knows_keeps_no_object_from_being_read() {
    let read = |quorum: Value| {
        let spec = json!({ "volumeName": "demo", "quorum": quorum });
        serde_json::from_value::<api::EngineSpec>(spec).unwrap().quorum
    };
    assert_eq!(read("majority".into()), api::Quorum::Majority);
    assert_eq!((read("of a newer version".into()), read(Value::Null)), Default::default());
    let volume =
        serde_json::from_value::<api::VolumeSpec>(json!({ "quorum": "of a newer version" })).unwrap();
    assert_eq!(volume.quorum, api::Quorum::Any);
}
