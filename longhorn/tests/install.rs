//! What is installed into a cluster: `deploy/` is the source, `longhornctl install manifests` prints it, and the chart is
//! made of it.
//!
//! With `UPDATE_GOLDEN=1` the chart's templates are written anew, to be looked at in the diff. That both are taken by an
//! API server, and are the same to it, is shown by `tests/cluster/install`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use lh_cluster::settings::{DEFINITIONS, Definition, Form};
use serde_json::{Value, json};

/// The files of `deploy/` in the order in which an API server takes them.
const FILES: &[&str] = &[
    "namespace",
    "crds",
    "priorityclass",
    "rbac",
    "manager",
    "csidriver",
    "csi",
    "storageclass",
    "webhooks",
    "confirmation",
];

fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn source(name: &str) -> String {
    read(&deploy().join(format!("{name}.yaml")))
}

fn printed(args: &[&str]) -> String {
    let done = Command::new(env!("CARGO_BIN_EXE_longhornctl"))
        .args(["install", "manifests"])
        .args(args)
        .env_remove("KUBECONFIG")
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    String::from_utf8(done.stdout).unwrap()
}

#[test]
fn what_is_printed_is_what_deploy_has() {
    let expected: String = FILES.iter().map(|name| format!("---\n{}", source(name))).collect();
    assert_eq!(printed(&[]), expected);
    let mut there: Vec<String> = fs::read_dir(deploy())
        .unwrap()
        .filter_map(|entry| Some(entry.unwrap().file_name().to_str()?.strip_suffix(".yaml")?.to_owned()))
        .collect();
    let mut known: Vec<String> = FILES.iter().map(|name| (*name).to_owned()).collect();
    there.sort();
    known.sort();
    assert_eq!(there, known, "every file of deploy/ is printed");
}

#[test]
fn images_are_those_that_were_asked_for() {
    let images = |text: &str| -> Vec<String> {
        let named = text.lines().filter_map(|line| line.trim().strip_prefix("image: "));
        named.map(str::to_owned).collect()
    };
    let own = images(&printed(&[]));
    assert_eq!(own.iter().filter(|i| i.starts_with("longhorn:")).count(), 4, "{own:?}");
    let text = printed(&["--image", "registry.example/lh:7", "--sidecar-registry", "mirror.example/csi/"]);
    let asked = images(&text);
    assert_eq!(asked.len(), own.len());
    for (before, after) in own.iter().zip(&asked) {
        match before.starts_with("longhorn:") {
            true => assert_eq!(after, "registry.example/lh:7"),
            false => assert_eq!(after, &format!("mirror.example/csi/{before}")),
        }
    }
    assert!(text.contains("--image, \"registry.example/lh:7\""), "engines and replicas name it, too");
    assert!(!text.contains(concat!("longhorn:", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn every_pod_pulls_with_the_secrets_that_were_named() {
    let text = printed(&["--image-pull-secret", "one", "--image-pull-secret", "two"]);
    let line = "      imagePullSecrets: [{name: \"one\"}, {name: \"two\"}]";
    let pods = text.matches("      containers:\n").count();
    assert_eq!((pods, text.lines().filter(|l| *l == line).count()), (4, 4));
    let refused = Command::new(env!("CARGO_BIN_EXE_longhornctl"))
        .args(["install", "manifests", "--image-pull-secret", "a: b"])
        .output()
        .unwrap();
    assert!(!refused.status.success());
}

#[test]
fn every_pod_has_the_priority_that_is_installed() {
    let text = printed(&[]);
    let named = |start: &str| text.lines().filter(|l| l.trim().starts_with(start)).collect::<Vec<_>>();
    assert_eq!(named("priorityClassName:"), ["      priorityClassName: longhorn-critical"; 4]);
    assert!(source("priorityclass").contains("\n  name: longhorn-critical\n"));
}

/// A part of a file that the chart has a value for. It has to be there.
type Hole<'a> = (&'a str, &'a str);

const IMAGES: &[Hole<'_>] = &[
    (
        concat!("        image: longhorn:", env!("CARGO_PKG_VERSION"), "\n"),
        "        image: {{ include \"longhorn.image\" (list . .Values.image.longhorn) | quote }}
        imagePullPolicy: {{ .Values.image.pullPolicy }}\n",
    ),
    (
        concat!("\"longhorn:", env!("CARGO_PKG_VERSION"), "\""),
        "{{ include \"longhorn.image\" (list . .Values.image.longhorn) | quote }}",
    ),
];

/// What every pod has after its priority.
const SECRETS: &str = "
      {{- if .Values.global.imagePullSecrets }}
      imagePullSecrets: {{ include \"longhorn.imagePullSecrets\" . }}
      {{- end }}\n";

/// A pod's nodes are those of the DaemonSets. Where an instance manager's pod goes its manager says.
const NODES: Hole<'_> = (
    "    spec:\n      serviceAccountName: ",
    "    spec:
      {{- with .Values.global.nodeSelector }}
      nodeSelector: {{ toJson . }}
      {{- end }}
      serviceAccountName: ",
);

const TOLERATIONS: Hole<'_> = (
    "      tolerations:\n      - operator: Exists\n",
    "      tolerations: {{ toJson .Values.longhornManager.tolerations }}\n",
);

const MANAGER: &[Hole<'_>] = &[
    NODES,
    TOLERATIONS,
    ("/var/lib/longhorn", "{{ include \"longhorn.dataPath\" . }}"),
    ("/var/lib/kubelet", "{{ include \"longhorn.kubeletRootDir\" . }}"),
    ("\ndata: {}\n", "\ndata: {{ include \"longhorn.defaultSettings\" . }}\n"),
    (
        "    metadata:\n      labels: {app.kubernetes.io/part-of: longhorn, app.kubernetes.io/component: manager}\n",
        "    metadata:
      labels: {app.kubernetes.io/part-of: longhorn, app.kubernetes.io/component: manager}
      {{- $settings := include \"longhorn.defaultSettings\" . }}
      {{- if ne $settings \"{}\" }}
      # Managers read them when they begin.
      annotations: {longhorn.io/default-settings: {{ sha256sum $settings }}}
      {{- end }}\n",
    ),
    (
        r#"resources: {"requests": {"cpu": "250m", "memory": "256Mi"}}"#,
        "resources: {{ toJson .Values.instanceManager.resources }}",
    ),
    (
        r#"resources: {"requests": {"cpu": "50m", "memory": "64Mi"}}"#,
        "resources: {{ toJson .Values.longhornManager.resources }}",
    ),
    (
        "        - {name: run, mountPath: /run/longhorn}\n",
        "        - {name: run, mountPath: /run/longhorn}
        {{- range $i, $path := .Values.extraDiskPaths }}
        - {name: disk-{{ $i }}, mountPath: {{ $path | quote }}, mountPropagation: HostToContainer}
        {{- end }}\n",
    ),
    (
        "        hostPath: {path: /run/longhorn, type: DirectoryOrCreate}\n",
        "        hostPath: {path: /run/longhorn, type: DirectoryOrCreate}
      {{- range $i, $path := .Values.extraDiskPaths }}
      - name: disk-{{ $i }}
        hostPath: {path: {{ $path | quote }}, type: Directory}
      {{- end }}\n",
    ),
];

const CSI: &[Hole<'_>] = &[
    NODES,
    TOLERATIONS,
    ("replicas: 2", "replicas: {{ .Values.csi.controllerReplicaCount }}"),
    ("/var/lib/kubelet", "{{ include \"longhorn.kubeletRootDir\" . }}"),
    (
        "      affinity:\n",
        "      {{- with .Values.longhornDriver.tolerations }}
      tolerations: {{ toJson . }}
      {{- end }}
      affinity:\n",
    ),
    (
        r#"resources: {"requests": {"cpu": "10m", "memory": "32Mi"}}"#,
        "resources: {{ toJson .Values.longhornDriver.resources }}",
    ),
];

const STORAGE_CLASS: &[Hole<'_>] = &[
    ("  name: longhorn\n", "  name: {{ .Values.persistence.name }}\n"),
    ("is-default-class: \"true\"", "is-default-class: {{ .Values.persistence.defaultClass | quote }}"),
    ("reclaimPolicy: Delete", "reclaimPolicy: {{ .Values.persistence.reclaimPolicy }}"),
    ("volumeBindingMode: Immediate", "volumeBindingMode: {{ .Values.persistence.volumeBindingMode }}"),
    (
        "numberOfReplicas: \"3\"",
        "numberOfReplicas: {{ .Values.persistence.defaultClassReplicaCount | int64 | quote }}",
    ),
    ("fsType: ext4", "fsType: {{ .Values.persistence.defaultFsType }}"),
    ("dataLocality: disabled", "dataLocality: {{ .Values.persistence.defaultDataLocality }}"),
    ("quorum: any", "quorum: {{ .Values.persistence.quorum }}"),
    (
        "  ioTimeout: \"300\"\n",
        "  ioTimeout: {{ .Values.persistence.ioTimeout | int64 | quote }}
  {{- with .Values.persistence.defaultMkfsParams }}
  mkfsParams: {{ . | quote }}
  {{- end }}
  {{- if .Values.persistence.migratable }}
  migratable: \"true\"
  {{- end }}
  {{- if .Values.persistence.defaultNodeSelector.enable }}
  nodeSelector: {{ .Values.persistence.defaultNodeSelector.selector | quote }}
  {{- end }}
  {{- if .Values.persistence.defaultDiskSelector.enable }}
  diskSelector: {{ .Values.persistence.defaultDiskSelector.selector | quote }}
  {{- end }}
  {{- if ne .Values.persistence.removeSnapshotsDuringFilesystemTrim \"ignored\" }}
  unmapMarkSnapChainRemoved: {{ .Values.persistence.removeSnapshotsDuringFilesystemTrim }}
  {{- end }}\n",
    ),
];

/// The holes of a sidecar's image, whose name and version are those of deploy/csi.yaml.
fn sidecars(csi: &str) -> Vec<(String, String)> {
    let images = csi.lines().filter_map(|line| line.trim().strip_prefix("image: csi-"));
    images
        .map(|image| {
            let (name, _) = image.split_once(':').unwrap();
            let value =
                format!("{{{{ include \"longhorn.image\" (list . .Values.image.csi.{name}) | quote }}}}");
            let place = format!("image: csi-{image}\n");
            (place, format!("image: {value}\n        imagePullPolicy: {{{{ .Values.image.pullPolicy }}}}\n"))
        })
        .collect()
}

/// The hole of pods' priority, and of what comes after it.
fn pods(value: &str) -> (String, String) {
    let priority = format!("      priorityClassName: {{{{ .Values.{value}.priorityClass }}}}{SECRETS}");
    ("      priorityClassName: longhorn-critical\n".to_owned(), priority)
}

fn template(name: &str, holes: &[&[Hole<'_>]], more: &[(String, String)]) -> String {
    let mut text = source(name);
    assert!(!text.contains("{{"), "deploy/{name}.yaml looks like a template");
    let more = more.iter().map(|(part, value)| (part.as_str(), value.as_str()));
    for (part, value) in holes.iter().copied().flatten().copied().chain(more) {
        assert!(text.contains(part), "deploy/{name}.yaml has no {part:?} any more");
        text = text.replace(part, value);
    }
    let text = format!(
        "# Made of deploy/{name}.yaml by UPDATE_GOLDEN=1 cargo test -p longhorn --test install\n{text}"
    );
    match name {
        "storageclass" => format!("{{{{- if .Values.persistence.create }}}}\n{text}{{{{- end }}}}\n"),
        _ => text,
    }
}

#[test]
fn the_chart_is_made_of_deploy() {
    let chart = deploy().join("chart");
    let (csi, plain) = (source("csi"), |name| (name, template(name, &[], &[])));
    let driver: Vec<_> = sidecars(&csi).into_iter().chain([pods("longhornDriver")]).collect();
    let templates = [
        plain("priorityclass"),
        plain("rbac"),
        ("manager", template("manager", &[IMAGES, MANAGER], &[pods("longhornManager")])),
        plain("csidriver"),
        ("csi", template("csi", &[&IMAGES[..1], CSI], &driver)),
        ("storageclass", template("storageclass", &[STORAGE_CLASS], &[])),
        plain("webhooks"),
        plain("confirmation"),
    ];
    for (name, fresh) in &templates {
        let path = chart.join(format!("templates/{name}.yaml"));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&path, fresh).unwrap();
        }
        assert!(read(&path) == *fresh, "{} is old: write it with UPDATE_GOLDEN=1", path.display());
    }
    let secrets = templates.iter().map(|(_, text)| text.matches("      imagePullSecrets: {{").count());
    assert_eq!(secrets.sum::<usize>(), 4, "every pod has a place for them");
    // The namespace is Helm's; the definitions stay when the chart goes.
    let made: Vec<&str> = templates.iter().map(|(name, _)| *name).chain(["namespace", "crds"]).collect();
    assert!(FILES.iter().all(|name| made.contains(name)), "every file of deploy/ is in the chart");
    assert_eq!(fs::read_link(chart.join("crds/crds.yaml")).unwrap(), Path::new("../../crds.yaml"));
    let version = env!("CARGO_PKG_VERSION");
    let about = read(&chart.join("Chart.yaml"));
    assert!(
        about.contains(&format!("\nversion: {version}\n"))
            && about.contains(&format!("\nappVersion: {version}\n"))
    );
    let values = read(&chart.join("values.yaml"));
    for image in csi.lines().filter_map(|line| line.trim().strip_prefix("image: csi-")) {
        let (name, tag) = image.split_once(':').unwrap();
        let line = format!("    {name}: {{registry: \"\", repository: csi-{name}, tag: {tag}}}\n");
        assert!(values.contains(&line), "values.yaml names another image than csi-{image}");
    }
}

/// What Helm makes of the managers' template with these further disks and this path of data; all other values are the defaults.
fn managers_of_the_chart(disks: &[&str], data_path: &str) -> String {
    let mut text = read(&deploy().join("chart/templates/manager.yaml"));
    text = text.split_once('\n').unwrap().1.to_owned();
    let range = "{{- range $i, $path := .Values.extraDiskPaths }}\n";
    while let Some((before, rest)) = text.split_once(range) {
        let (each, rest) = rest.split_once("{{- end }}\n").unwrap();
        let all = disks.iter().enumerate().map(|(i, path)| {
            each.replace("{{ $i }}", &i.to_string()).replace("{{ $path | quote }}", &format!("{path:?}"))
        });
        // The expressions stand behind spaces that go with the line before.
        let all: String = all.map(|one| one.trim_end_matches(' ').to_owned()).collect();
        text = format!("{}{all}{rest}", before.trim_end_matches(' '));
    }
    let usual = data_path == "/var/lib/longhorn";
    let settings = if usual { json!({}) } else { json!({ "default-data-path": data_path }) }.to_string();
    let set = "      {{- $settings := include \"longhorn.defaultSettings\" . }}
      {{- if ne $settings \"{}\" }}\n";
    let (before, rest) = text.split_once(set).unwrap();
    let (marked, rest) = rest.split_once("      {{- end }}\n").unwrap();
    let sum = Command::new("sh")
        .args(["-c", "printf %s \"$1\" | sha256sum", "-", &settings])
        .output()
        .map(|done| String::from_utf8(done.stdout).unwrap()[..64].to_owned());
    let marked = marked.replace("{{ sha256sum $settings }}", &sum.unwrap());
    text = format!("{before}{}{rest}", if usual { "" } else { &marked });
    text = text.replace("{{ include \"longhorn.defaultSettings\" . }}", &settings);
    text = text.replace("{{ include \"longhorn.dataPath\" . }}", data_path);
    let pods = pods("longhornManager");
    text = text.replace(&pods.1, &pods.0);
    for (part, value) in IMAGES.iter().chain(MANAGER) {
        text = text.replace(value, part);
    }
    assert!(!text.contains("{{"), "{text}");
    text
}

#[test]
fn disks_and_the_path_of_data_are_given_to_pods_as_the_chart_gives_them() {
    for (disks, data_path) in [
        (&[][..], "/var/lib/longhorn"),
        (&["/mnt/disk1"], "/var/lib/longhorn"),
        (&["/var/lib/longhorn-2", "/mnt/two words"], "/var/lib/longhorn"),
        (&[], "/data/longhorn"),
        (&["/mnt/b", "/mnt/a", "/var/lib/longhorn"], "/data/longhorn"),
    ] {
        let managers = managers_of_the_chart(disks, data_path);
        let of = |name: &&str| if *name == "manager" { managers.clone() } else { source(name) };
        let expected: String = FILES.iter().map(|name| format!("---\n{}", of(name))).collect();
        let mut args: Vec<&str> = disks.iter().flat_map(|path| ["--disk", path]).collect();
        if data_path != "/var/lib/longhorn" {
            args.extend(["--data-path", data_path]);
        }
        let given = printed(&args);
        let differs = given.lines().zip(expected.lines()).find(|(given, expected)| given != expected);
        assert!(given == expected, "{args:?}: {differs:?}");
        assert_eq!(given.matches("name: disk-").count(), 4 * disks.len(), "two pods, and two places in each");
    }
}

#[test]
fn a_directory_that_pods_cannot_be_given_is_refused_by_its_name() {
    for (args, says) in [
        (&["--disk", "mnt/disk1"][..], "is no absolute path"),
        (&["--disk", "/mnt/../disk1"], "write where that leads"),
        (&["--disk", "/mnt/disk1/"], "is written /mnt/disk1"),
        (&["--disk", "/"], "of their own"),
        (&["--disk", "/mnt/a", "--disk", "/mnt/b", "--disk", "/mnt/a"], "--disk /mnt/a is given twice"),
        (&["--disk", "/var/lib/longhorn"], "leave it out"),
        (&["--disk", "/var/lib/longhorn/disk2"], "leave it out"),
        (&["--disk", "/data", "--data-path", "/data/longhorn"], "would hide /data/longhorn"),
        (&["--data-path", "data"], "is no absolute path"),
    ] {
        let refused = Command::new(env!("CARGO_BIN_EXE_longhornctl"))
            .args(["install", "manifests"])
            .args(args)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert_eq!((refused.status.code(), refused.stdout.len()), (Some(2), 0), "{args:?}: {said}");
        assert!(said.contains(says), "{args:?}: {said}");
    }
}

#[test]
fn the_dockerfile_builds_with_the_trees_toolchain() {
    let toolchain = read(&deploy().join("../rust-toolchain.toml"));
    let channel =
        toolchain.lines().find_map(|line| line.strip_prefix("channel = ")).unwrap().trim_matches('"');
    let line = format!("\nARG RUST={channel}\n");
    assert!(read(&deploy().join("../Dockerfile")).contains(&line), "it has no {line:?}");
}

/// What a setting is in the values of Longhorn's chart.
fn in_camel_case(setting: &str) -> String {
    let mut words = setting.split('-');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |name, word| name + &word[..1].to_uppercase() + &word[1..])
}

/// A value for each data engine, as Longhorn writes some since 1.10: `{"v1":"3","v2":"2"}`.
const BY_ENGINE: &str = r#"\{ *"v[12]" *:.*\}"#;

/// What JSON Schema says of a setting. Longhorn's users write numbers and flags as text, too; null leaves the default.
fn schema_of(definition: &Definition) -> Value {
    match definition.form {
        // Volumes of every node lie there.
        _ if definition.name == "default-data-path" => {
            json!({ "type": ["string", "null"], "pattern": "^/." })
        }
        // Helm's expressions are Go's.
        Form::Bool => json!({
            "type": ["boolean", "string", "null"], "pattern": format!("^(true|false|{BY_ENGINE})$")
        }),
        Form::Number(low, high) => json!({
            "type": ["integer", "string", "null"], "minimum": low, "maximum": high,
            "pattern": format!("^([0-9]+|{BY_ENGINE})$")
        }),
        Form::Word(words) => {
            json!({ "type": ["string", "null"], "pattern": format!("^({}|{BY_ENGINE})$", words.join("|")) })
        }
        Form::AnyCase(words) => json!({
            "type": ["string", "null"], "pattern": format!("^((?i:{})|{BY_ENGINE})$", words.join("|"))
        }),
        Form::Text | Form::Words(_) => json!({ "type": ["string", "null"] }),
    }
}

#[test]
fn the_schema_of_values_knows_every_setting_and_no_other() {
    let path = deploy().join("chart/values.schema.json");
    let mut schema: Value = serde_json::from_str(&read(&path)).unwrap();
    let settings = &mut schema["properties"]["defaultSettings"]["properties"];
    let fresh: Value = DEFINITIONS.iter().map(|d| (in_camel_case(d.name), schema_of(d))).collect();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        *settings = fresh;
        fs::write(&path, serde_json::to_string_pretty(&schema).unwrap() + "\n").unwrap();
    } else {
        assert_eq!(*settings, fresh, "{} is old: write it with UPDATE_GOLDEN=1", path.display());
    }
}

/// What `install systemd` has written below a directory of the test's own, for this build's programs.
fn written(into: &Path, root: &Path) -> std::process::Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_longhornctl"));
    command.args(["install", "systemd", "--into"]).arg(into).arg("--root").arg(root);
    command.output().unwrap()
}

#[test]
fn units_are_deploys_and_name_these_programs_and_the_root() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap().join("root");
    let done = written(dir.path(), &root);
    let said = String::from_utf8_lossy(&done.stdout).into_owned();
    let next = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success(), "{next}");
    // This host has none of it: what its systemd and udev are told changes nothing.
    let enable = format!("systemctl --root {} enable longhorn-volumes", dir.path().display());
    assert!(next.contains(&enable) && !next.contains("daemon-reload") && !next.contains("--now"), "{next}");
    assert_eq!(said.lines().count(), 5, "{said}");
    let programs = Path::new(env!("CARGO_BIN_EXE_longhornctl")).parent().unwrap().display().to_string();
    for path in said.lines().map(Path::new) {
        let source = read(&deploy().join("host").join(path.file_name().unwrap()));
        let expected = source
            .replace("/var/lib/longhorn", &root.display().to_string())
            .replace("/usr/local/bin", &programs);
        assert_eq!(read(path), expected, "{}", path.display());
    }
    let again = written(dir.path(), &root);
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    let other = written(dir.path(), &dir.path().join("another"));
    let refused = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && refused.contains(root.to_str().unwrap()), "{refused}");
}

#[test]
fn all_units_are_written_whoever_reads_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let (reader, names) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_longhornctl"));
    command.args(["install", "systemd", "--write", "--into"]).arg(dir.path()).arg("--root").arg("/srv");
    assert!(command.stdout(names).status().unwrap().success());
    for (place, files) in [("etc/systemd/system", 4), ("etc/udev/rules.d", 1)] {
        assert_eq!(fs::read_dir(dir.path().join(place)).unwrap().count(), files, "{place}");
    }
}

#[test]
fn systemd_takes_the_units() {
    let verify =
        |units: &[PathBuf]| Command::new("systemd-analyze").args(["verify", "--man=no"]).args(units).output();
    let dir = tempfile::tempdir().unwrap();
    assert!(written(dir.path(), &dir.path().join("root")).status.success());
    let below = dir.path().join("etc/systemd/system");
    let names = [
        "longhorn-instance-manager.service",
        "longhorn-volumes.service",
        "longhorn-shutdown.service",
        "longhorn-volume@demo.service",
    ];
    let units = names.map(|name| below.join(name));
    let Ok(done) = verify(&units) else {
        eprintln!("SKIP systemd_takes_the_units: no systemd-analyze");
        return;
    };
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert!(done.status.success() && !said.contains("longhorn"), "{said}");
    // That it would notice.
    fs::write(&units[0], read(&units[0]).replace("KillMode=process", "KillMode=sometimes")).unwrap();
    let noticed = String::from_utf8_lossy(&verify(&units[..1]).unwrap().stderr).into_owned();
    assert!(noticed.contains("sometimes"), "{noticed}");
}
