//! `check move`: what of a cluster of Longhorn's cannot be used here, one volume of each kind.
//!
//! `golden/` holds what is printed, written anew with `UPDATE_GOLDEN=1`.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

/// A resource with what Longhorn writes beside what matters here.
fn resource(kind: &str, name: &str, spec: Value, status: Value) -> Value {
    json!({ "apiVersion": "longhorn.io/v1beta2", "kind": kind, "spec": spec, "status": status,
        "metadata": { "name": name, "namespace": "longhorn-system", "generation": 3, "finalizers": ["longhorn.io"] } })
}

fn volume(name: &str, spec: Value, status: Value) -> Value {
    let mut whole = json!({ "Standby": false, "accessMode": "rwo", "backingImage": "", "dataEngine": "v1",
        "dataSource": "", "encrypted": false, "fromBackup": "", "frontend": "blockdev", "migratable": false,
        "numberOfReplicas": 3, "size": "1073741824", "snapshotMaxSize": "0", "dataLocality": "disabled" });
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    let mut now = json!({ "state": "detached", "robustness": "unknown", "restoreInitiated": false,
        "restoreRequired": false, "cloneStatus": { "state": "", "snapshot": "", "sourceVolume": "" } });
    now.as_object_mut().unwrap().extend(status.as_object().unwrap().clone());
    resource("Volume", name, whole, now)
}

fn node(name: &str, disks: &[(&str, &str)]) -> Value {
    let disk = |(at, (path, kind)): (usize, &(&str, &str))| {
        (format!("disk-{at}"), json!({ "path": path, "diskType": kind, "allowScheduling": true, "tags": [] }))
    };
    let disks: Value = disks.iter().enumerate().map(disk).collect();
    resource("Node", name, json!({ "name": name, "disks": disks, "allowScheduling": true }), json!({}))
}

fn cloned(state: &str) -> Value {
    json!({ "cloneStatus": { "state": state, "snapshot": "s", "sourceVolume": "plain" } })
}

fn restored(begun: bool, due: bool) -> Value {
    json!({ "restoreInitiated": begun, "restoreRequired": due })
}

/// Volumes that can be moved.
fn movable() -> Vec<Value> {
    let backup = json!({ "fromBackup": "s3://b@r/?backup=x&volume=y" });
    vec![
        volume("plain", json!({}), json!({ "state": "attached" })),
        volume("restored", backup, restored(true, false)),
        volume("cloned", json!({ "dataSource": "snap://plain/s" }), cloned("completed")),
        volume("migrates", json!({ "accessMode": "rwx", "migratable": true }), json!({})),
        volume("one-pod", json!({ "accessMode": "rwop" }), json!({})),
    ]
}

/// Volumes that cannot be, one of each kind.
fn unmovable() -> Vec<Value> {
    let backup = json!({ "fromBackup": "s3://b@r/?backup=x&volume=y" });
    vec![
        volume("encrypted", json!({ "encrypted": true }), json!({})),
        volume("on-an-image", json!({ "backingImage": "debian" }), json!({})),
        volume("standby", json!({ "Standby": true, "fromBackup": "s3://b" }), restored(true, true)),
        volume("half-restored", backup.clone(), restored(true, true)),
        volume("not-restored", backup, restored(false, false)),
        volume("shared", json!({ "accessMode": "rwx" }), json!({})),
        volume("half-cloned", json!({ "dataSource": "vol://plain" }), cloned("initiated")),
        volume("clone-failed", json!({ "dataSource": "snap://plain/s" }), cloned("failed")),
        volume("clone-not-begun", json!({ "dataSource": "vol://plain" }), cloned("")),
        volume("spdk", json!({ "dataEngine": "v2" }), json!({})),
        volume("garbled", json!({ "size": {} }), json!({})),
    ]
}

fn nodes() -> Vec<Value> {
    let own = ("/var/lib/longhorn/", "filesystem");
    vec![
        node("node-1", &[own, ("/mnt/disk1", "filesystem"), ("/dev/nvme1n1", "block")]),
        node("node-2", &[own, ("/mnt/disk1/", ""), ("/var/lib/longhorn-2", "filesystem")]),
        node("node-3", &[("/var/lib/longhorn/more", "filesystem")]),
        // One of Kubernetes', where somebody asks for "nodes".
        json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "node-9" }, "spec": {} }),
    ]
}

fn list(items: &[Vec<Value>]) -> String {
    json!({ "apiVersion": "v1", "kind": "List", "items": items.concat(), "metadata": { "resourceVersion": "" } })
        .to_string()
}

fn asked(options: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longhornctl"));
    command.args(options).args(["check", "move", "-"]).env_remove("LONGHORN_ROOT").env_remove("KUBECONFIG");
    command.env_remove("COLUMNS").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn golden(name: &str, actual: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, actual).unwrap();
    }
    let promised = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    assert!(promised == actual, "{} differs; promised:\n{promised}\nis:\n{actual}", path.display());
}

#[test]
fn what_cannot_be_moved_is_listed_with_what_speaks_against_it() {
    let input = list(&[movable(), unmovable(), nodes()]);
    let table = asked(&[], &input);
    golden("check-move.txt", &text(&table.stdout));
    assert_eq!(table.status.code(), Some(1));
    let said = text(&table.stderr);
    assert!(said.contains("11 of 16 volumes cannot be used here"), "{said}");

    let as_json = asked(&["-o", "json"], &input);
    assert_eq!(as_json.status.code(), Some(1));
    let found: Value = serde_json::from_slice(&as_json.stdout).unwrap();
    let names = |list: &Value, key: &str| -> Vec<String> {
        list.as_array().unwrap().iter().map(|one| one[key].as_str().unwrap().to_owned()).collect()
    };
    let expected: Vec<Value> = unmovable().iter().map(|v| v["metadata"]["name"].clone()).collect();
    assert_eq!(json!(names(&found["volumes"], "volume")), json!(expected));
    for (volume, says) in [
        ("encrypted", "encryption"),
        ("on-an-image", "backing images"),
        ("standby", "standby volumes"),
        ("half-restored", "has not restored it"),
        ("not-restored", "has not restored it"),
        ("shared", "accessMode rwx"),
        ("half-cloned", "a clone that Longhorn has not finished (vol://plain)"),
        ("clone-failed", "a clone that Longhorn has not finished"),
        ("clone-not-begun", "a clone that Longhorn has not finished"),
        ("spdk", "v2 data engine"),
        ("garbled", "cannot be read"),
    ] {
        let told = found["volumes"].as_array().unwrap().iter().find(|v| v["volume"] == volume).unwrap();
        assert!(told["reason"].as_str().unwrap().contains(says), "{told}");
    }
    assert_eq!(names(&found["disks"], "path"), ["/mnt/disk1", "/var/lib/longhorn-2"]);
    assert_eq!(found["disks"][0]["nodes"], json!(["node-1", "node-2"]));
    assert_eq!(found["disks"][0]["without"], json!(["node-3"]));
}

#[test]
fn where_nothing_speaks_against_it_the_exit_status_says_so() {
    let done = asked(&[], &list(&[movable(), nodes()]));
    let said = text(&done.stdout);
    assert!(done.status.success(), "{said} {}", text(&done.stderr));
    assert!(said.contains("nothing speaks against 5 volumes"), "{said}");
    let install =
        "\nlonghornctl install manifests --image IMAGE --disk /mnt/disk1 --disk /var/lib/longhorn-2\n";
    assert!(said.ends_with(install), "{said}");

    let usual =
        asked(&[], &list(&[movable(), vec![node("node-1", &[("/var/lib/longhorn/", "filesystem")])]]));
    let said = text(&usual.stdout);
    assert!(usual.status.success() && said.contains("all disks lie in /var/lib/longhorn"), "{said}");

    let odd = asked(&[], &list(&[movable(), vec![node("node-1", &[("/mnt/a:b", "filesystem")])]]));
    assert_eq!(odd.status.code(), Some(1));
    assert!(text(&odd.stdout).contains("':'") && text(&odd.stderr).contains("1 disk cannot be given"));
}

#[test]
fn what_was_not_asked_as_it_has_to_be_is_no_answer() {
    for input in ["", "NAME READY", "{}", &list(&[]), &list(&[movable()]), &list(&[nodes()[3..].to_vec()])] {
        let refused = asked(&[], input);
        let said = text(&refused.stderr);
        assert_eq!((refused.status.code(), text(&refused.stdout).as_str()), (Some(1), ""), "{input}");
        assert!(said.contains("kubectl get volumes.longhorn.io,nodes.longhorn.io"), "{said}");
    }
}
