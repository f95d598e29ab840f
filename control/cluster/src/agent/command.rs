//! The command lines of the processes: Longhorn's `controller` and `replica`, with this project's options.

use std::path::Path;

use control::host::{IO_TIMEOUT_SECONDS, Root};

use super::{EngineStart, Reach};
use crate::api::{Frontend, ReplicaSpec};

/// Most queues that an engine takes.
const QUEUES_MAX: i64 = 64;
/// Fewest and most requests of a queue of a ublk device that it takes. Longhorn's classes may ask for others.
const DEPTHS: (i64, i64) = (8, 128);

/// The option's value for a frontend.
const fn frontend_option(frontend: Frontend) -> &'static str {
    match frontend {
        Frontend::Blockdev => "auto",
        Frontend::Ublk => "ublk",
        Frontend::Nbd => "nbd",
        Frontend::Fuse => "fuse",
        Frontend::Iscsi => "iscsi-target",
        Frontend::NbdServer => "nbd-server",
        // Refused before an engine is started.
        Frontend::Nvmf | Frontend::None => "none",
    }
}

/// The option's value for the socket of a manager.
pub(crate) fn authority_at(socket: &Path) -> String {
    format!("unix:{}", socket.display())
}

/// The arguments of the process of an engine, or of a relay. On a network one of a migratable volume is told where to listen for
/// relays by the instance manager, which gives it the port; it keeps that when it takes another one's place.
pub fn engine_command(root: &Root, authority: &Path, reach: Reach, start: &EngineStart<'_>) -> Vec<String> {
    let spec = start.spec;
    let frontend = if spec.disable_frontend { Frontend::None } else { spec.frontend };
    let mut line = vec!["controller".to_owned()];
    let mut option = |name: &str, value: String| line.extend([format!("--{name}"), value]);
    option("engine-instance-name", start.name.to_owned());
    option("size", spec.volume_size.bytes().to_string());
    option("frontend", frontend_option(frontend).to_owned());
    option("quorum", spec.quorum.to_string());
    option("io-timeout", spec.io_timeout.map_or(IO_TIMEOUT_SECONDS, u64::from).to_string());
    if spec.ublk_number_of_queue > 0 {
        option("queues", spec.ublk_number_of_queue.min(QUEUES_MAX).to_string());
    }
    if spec.ublk_queue_depth > 0 {
        option("ublk-queue-depth", spec.ublk_queue_depth.clamp(DEPTHS.0, DEPTHS.1).to_string());
    }
    let limits = spec.snapshot_limits();
    option("snapshot-max-count", limits.count.to_string());
    option("snapshot-max-size", limits.bytes.to_string());
    option("generation", u64::from(start.generation).to_string());
    option("authority", authority_at(authority));
    option("key-file", root.key(&spec.volume_name).display().to_string());
    option("listen", format!("unix:{}", root.control_socket(start.name).display()));
    option("root", root.path().display().to_string());
    if !start.stay.is_empty() {
        option("stay", start.stay.to_owned());
    }
    if spec.relays() {
        option("relay-from", spec.relay_from.clone());
    }
    if spec.migratable && reach == Reach::ThisMachine {
        option("relay-listen", format!("unix:{}", root.relay_socket(start.name).display()));
    }
    for (name, address) in &spec.replica_address_map {
        option("replica", format!("{name}={address}"));
    }
    if matches!(reach, Reach::Network(_)) {
        line.push("--insecure".to_owned());
    }
    line.push(spec.volume_name.clone());
    line
}

/// The arguments of a process that takes away what a stay has left.
pub(super) fn end_stay_command(root: &Root, volume: &str, stay: &str) -> Vec<String> {
    let root = root.path().display().to_string();
    ["end-stay", "--root", &root, "--stay", stay, volume].map(str::to_owned).into()
}

/// The arguments of a replica's process. On a network it is told where to listen for data by the instance manager, which
/// gives it the port.
pub fn replica_command(root: &Root, reach: Reach, name: &str, spec: &ReplicaSpec) -> Vec<String> {
    let directory = Path::new(&spec.disk_path).join("replicas").join(&spec.data_directory_name);
    let mut line = vec!["replica".to_owned()];
    let mut option = |name: &str, value: String| line.extend([format!("--{name}"), value]);
    option("volume-name", spec.volume_name.clone());
    option("replica-instance-name", name.to_owned());
    if spec.clone_from.directory.is_empty() {
        option("size", spec.volume_size.bytes().to_string());
    } else {
        option("clone-from", spec.clone_from.directory.clone());
        option("clone-snapshot", spec.clone_from.snapshot.clone());
    }
    option("listen", format!("unix:{}", root.control_socket(name).display()));
    if reach == Reach::ThisMachine {
        option("data-listen", format!("unix:{}", root.data_socket(name).display()));
    }
    option("key-file", root.key(&spec.volume_name).display().to_string());
    if matches!(reach, Reach::Network(_)) {
        line.push("--insecure".to_owned());
    }
    line.push(directory.display().to_string());
    line
}

#[cfg(test)]
mod tests {
    use lh_block::Generation;

    use super::*;
    use crate::api::{EngineSpec, Int64Text};

    #[test]
    fn command_lines_are_what_the_programs_take() {
        let dir = tempfile::tempdir().unwrap();
        let root = Root::at(dir.path()).unwrap();
        let path = root.path().display();
        let mut spec = EngineSpec {
            volume_name: "demo".into(),
            volume_size: Int64Text(4096),
            snapshot_max_count: 7,
            snapshot_max_size: Int64Text(8192),
            ..EngineSpec::default()
        };
        spec.replica_address_map.insert("demo-r-1".into(), "unix:/r/1.sock".into());
        let start = EngineStart {
            name: "demo-e-0",
            spec: &spec,
            generation: Generation { attachment: 2, restart: 0 },
            stay: "7",
        };
        let here = Reach::ThisMachine;
        let line = engine_command(&root, Path::new("/run/a.sock"), here, &start).join(" ");
        let expected = format!(
            "controller --engine-instance-name demo-e-0 --size 4096 --frontend auto --quorum any --io-timeout 300 \
             --snapshot-max-count 7 --snapshot-max-size 8192 --generation 8589934592 --authority unix:/run/a.sock --key-file {path}/volumes/demo/key \
             --listen unix:{path}/run/demo-e-0.grpc.sock --root {path} --stay 7 --replica demo-r-1=unix:/r/1.sock demo"
        );
        assert_eq!(line, expected);
        let migratable =
            EngineSpec { migratable: true, relay_from: "tcp:10.0.0.1:10003".into(), ..spec.clone() };
        let line = engine_command(&root, Path::new("/a"), here, &EngineStart { spec: &migratable, ..start })
            .join(" ");
        let relays =
            format!("--relay-from tcp:10.0.0.1:10003 --relay-listen unix:{path}/run/demo-e-0.relay.sock");
        assert!(line.contains(&relays), "{line}");
        let ublk = EngineSpec { ublk_number_of_queue: 3, ublk_queue_depth: 4096, ..spec.clone() };
        let line =
            engine_command(&root, Path::new("/a"), here, &EngineStart { spec: &ublk, ..start }).join(" ");
        assert!(line.contains("--queues 3 --ublk-queue-depth 128"), "{line}");
        let maintenance = EngineSpec { disable_frontend: true, ..spec.clone() };
        let start = EngineStart { spec: &maintenance, ..start };
        assert!(engine_command(&root, Path::new("/a"), here, &start).join(" ").contains("--frontend none"));
        let replica = ReplicaSpec {
            volume_name: "demo".into(),
            volume_size: Int64Text(4096),
            disk_path: "/disk".into(),
            data_directory_name: "demo-1".into(),
            ..ReplicaSpec::default()
        };
        let line = replica_command(&root, here, "demo-r-1", &replica).join(" ");
        let expected = format!(
            "--data-listen unix:{path}/run/demo-r-1.sock --key-file {path}/volumes/demo/key /disk/replicas/demo-1"
        );
        assert!(line.ends_with(&expected), "{line}");
        let network = Reach::Network([10, 0, 0, 7].into());
        let line = replica_command(&root, network, "demo-r-1", &replica).join(" ");
        assert!(!line.contains("--data-listen") && line.contains("--insecure"), "{line}");
        assert!(engine_command(&root, Path::new("/a"), network, &start).contains(&"--insecure".to_owned()));
    }
}
