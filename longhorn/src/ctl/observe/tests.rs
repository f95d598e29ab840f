use std::path::Path;

use lh_block::Instance;
use replica::store::{CreateOptions, Directory};

use super::*;

/// Whoever waits with it for an answer waits as long as it hangs.
#[tokio::test]
async fn a_manager_with_whom_too_many_wait_is_there_and_is_not_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path()).unwrap();
    root.create().unwrap();
    assert!(!has_manager(&root));
    let at = SocketAddrUnix::new(root.manager_socket()).unwrap();
    let listener = socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
    rustix::net::bind(&listener, &at).unwrap();
    rustix::net::listen(&listener, 0).unwrap();
    let _waits = std::os::unix::net::UnixStream::connect(root.manager_socket()).unwrap();
    let (told, heard) = std::sync::mpsc::channel();
    let same = root.clone();
    std::thread::spawn(move || told.send(has_manager(&same)));
    assert_eq!(heard.recv_timeout(Duration::from_secs(10)), Ok(true));
    // Nor does who asks where it obeys.
    std::fs::write(root.manager_lock(), "1\n127.0.0.1:8500\n").unwrap();
    let (told, heard) = std::sync::mpsc::channel();
    let same = root.clone();
    std::thread::spawn(move || told.send(control::manager::obeys_at(&same)));
    assert_eq!(heard.recv_timeout(Duration::from_secs(10)), Ok(Some("127.0.0.1:8500".to_owned())));
    let refused = super::super::manager::Manager::find(&root).await.unwrap_err().to_string();
    assert!(refused.contains("does not answer") && refused.contains("is killed"), "{refused}");
}

fn replica(mode: Mode) -> ReplicaView {
    ReplicaView {
        name: "demo-r-1".into(),
        mode,
        address: "unix:/r/1.sock".into(),
        path: "/r/replicas/demo-1".into(),
        pid: Some(3),
        ..ReplicaView::default()
    }
}

#[test]
fn how_far_a_rebuild_is_is_told_in_bytes() {
    let told = |rebuild| {
        serde_json::to_value(ReplicaView { rebuild, ..replica(Mode::Wo) }).unwrap()["rebuild"].clone()
    };
    assert_eq!(told(Some((1, 4))), serde_json::json!({"done": 1, "total": 4}));
    assert_eq!(told(None), serde_json::Value::Null);
}

#[test]
fn of_a_replica_that_has_given_up_the_way_back_is_told_where_there_is_one() {
    let root = Root::unresolved(Path::new("/var/r"));
    let gone = || ReplicaView {
        remark: "volume.meta is not JSON".into(),
        has_given_up: true,
        path: "/".into(),
        ..replica(Mode::Err)
    };
    let mut beside_another = [gone(), replica(Mode::Rw)];
    name_a_way_back(&root, "demo", &mut beside_another);
    let said = &beside_another[0].remark;
    assert!(said.starts_with("volume.meta is not JSON. `longhornctl replica rm demo demo-r-1`"), "{said}");
    assert!(said.contains("`longhornctl replica add demo`") && beside_another[1].remark.is_empty(), "{said}");
    let mut missing = [replica(Mode::Err), replica(Mode::Rw)];
    name_a_way_back(&root, "demo", &mut missing);
    let said = &missing[0].remark;
    assert!(said.contains("/r/replicas/demo-1 is not there: mount its disk"), "{said}");
    assert!(missing[1].remark.is_empty(), "one that serves has its files, whatever their names are");
    let own = || ReplicaView { path: root.replica("demo", "1"), ..replica(Mode::Err) };
    let mut comes_back = [own(), replica(Mode::Rw)];
    name_a_way_back(&root, "demo", &mut comes_back);
    assert_eq!(comes_back[0].remark, "");
    // Nobody is told to delete the last copy.
    let mut alone = [gone(), replica(Mode::Err)];
    name_a_way_back(&root, "demo", &mut alone);
    assert_eq!(alone[0].remark, "volume.meta is not JSON");
}

/// A volume of this quorum with three replicas, of which the first was left out, and how it fares.
fn left_out(dir: &Path, quorum: Quorum) -> (Root, VolumeRecord) {
    let root = Root::at(&dir.join(quorum.as_str())).unwrap();
    root.create().unwrap();
    let mut record = VolumeRecord::new("demo", 1 << 20);
    record.quorum = quorum;
    for _ in 0..3 {
        record.add_replica(&root).unwrap();
    }
    record.create(&root).unwrap();
    let names: Vec<String> = record.replicas.iter().map(|replica| replica.name.clone()).collect();
    std::fs::create_dir_all(root.replicas()).unwrap();
    for (number, replica) in record.replicas.iter().enumerate() {
        let options = CreateOptions { size: 1 << 20, backing: None, lock_wait: Duration::from_secs(5) };
        let (mut directory, mut store) = Directory::create(&replica.directory, &options).unwrap();
        let counter = if number == 0 { 1 } else { 2 };
        let members = names[usize::from(number != 0)..].to_vec();
        let epoch = Epoch { counter, members, id: Instance(counter.into()), ..Epoch::default() };
        directory.store_epoch(epoch).unwrap();
        directory.close_clean(store.close()).unwrap();
    }
    (root, record)
}

#[test]
fn the_modes_of_a_stopped_volume_are_what_its_replicas_tell_where_no_authority_does() {
    let dir = tempfile::tempdir().unwrap();
    for quorum in [Quorum::Majority, Quorum::Unsafe] {
        let (root, record) = left_out(dir.path(), quorum);
        let modes = |record: &VolumeRecord, is_stopped| {
            let last = LastModes::of(&root, record, is_stopped).unwrap();
            record.replicas.iter().enumerate().map(|(n, r)| last.mode(n, r)).collect::<Vec<_>>()
        };
        assert_eq!(modes(&record, true), [Mode::Err, Mode::Rw, Mode::Rw], "{quorum}");
        // What an engine that does not answer has for members its replicas do not tell.
        assert_eq!(modes(&record, false), [Mode::Err; 3], "{quorum}");
        // The directories are another volume's until it starts.
        let mut other = record.clone();
        for (number, replica) in other.replicas.iter_mut().enumerate() {
            (replica.name, replica.imported) = (format!("other-r-{number}"), true);
        }
        assert_eq!(modes(&other, true), [Mode::Rw, Mode::Err, Mode::Err], "{quorum}");
        for replica in &record.replicas[1..] {
            std::fs::rename(&replica.directory, replica.directory.with_extension("away")).unwrap();
        }
        // A newer epoch may be where nobody can look.
        let told = if quorum == Quorum::Majority { [Mode::Err; 3] } else { [Mode::Rw, Mode::Err, Mode::Err] };
        assert_eq!(modes(&record, true), told, "{quorum}");
        std::fs::rename(&record.replicas[0].directory, root.replicas().join("away")).unwrap();
        assert_eq!(modes(&record, true), [Mode::Rw; 3], "{quorum}: as before the first start");
    }
}

#[test]
fn robustness_counts_those_that_can_serve() {
    let of = |modes: &[Mode]| {
        let replicas: Vec<_> = modes.iter().map(|m| replica(*m)).collect();
        robustness(Attachment::Attached, true, &replicas)
    };
    assert_eq!(of(&[Mode::Rw, Mode::Rw, Mode::Rw]), Robustness::Healthy);
    assert_eq!(of(&[Mode::Rw, Mode::Wo, Mode::Rw]), Robustness::Degraded);
    assert_eq!(of(&[Mode::Err, Mode::Wo]), Robustness::Faulted);
    assert_eq!(robustness(Attachment::Detached, false, &[replica(Mode::Rw)]), Robustness::Unknown);
    assert_eq!(robustness(Attachment::Attaching, true, &[replica(Mode::Err)]), Robustness::Unknown);
}

#[test]
fn what_listens_on_tcp_is_open_and_a_unix_socket_is_not() {
    let of = |uri: &str| open_address(uri).unwrap_or_default();
    assert_eq!(of("nbd://127.0.0.1:10809/demo"), "NBD server on 127.0.0.1:10809");
    assert_eq!(of("iscsi://[::1]:3260/iqn.2019-10.io.longhorn:demo/1"), "iSCSI target on [::1]:3260");
    assert_eq!(of("nbd+unix:///demo?socket=/run/longhorn/demo.nbd.sock"), "");
    assert_eq!(of(""), "");
    assert!(is_for_this_host("iscsi://[::1]:3260/iqn:demo/1") && is_for_this_host("nbd://127.0.0.1:1/a"));
    for uri in ["iscsi://10.0.0.1:3260/iqn:demo/1", "nbd+unix:///demo?socket=/run/x", "nbd://host:1/a", ""] {
        assert!(!is_for_this_host(uri), "{uri}");
    }
}

#[test]
fn a_volume_that_waits_for_space_says_so() {
    let full = ptypes::Volume { name: "demo".into(), lacks_space: true, ..Default::default() };
    let said = remark(None, Some(&full), 300);
    assert!(said.contains("full") && said.contains("`longhornctl snapshot purge demo`"), "{said}");
    let starting = ptypes::Volume { waiting_for: "its replicas".into(), ..full };
    assert_eq!(remark(None, Some(&starting), 300), "its replicas");
    assert_eq!(remark(None, Some(&ptypes::Volume::default()), 300), "");
}

#[test]
fn what_becomes_of_requests_is_told_where_too_few_replicas_are_left_whatever_the_engine_says_of_them() {
    let told = |waiting_for: &str, timeout| {
        let volume = ptypes::Volume {
            wait: Wait::Replicas.into(),
            waiting_for: waiting_for.into(),
            ..Default::default()
        };
        remark(None, Some(&volume), timeout)
    };
    assert_eq!(
        told("two lack", 7),
        "two lack: requests wait for them, 7 s at most (--io-timeout), and fail then"
    );
    let why = "too few replicas are left (demo-r-1: its key is another)";
    assert_eq!(told(why, 0), format!("{why}: requests wait for them, however long it takes"));
}

#[test]
fn a_volume_that_has_lost_something_says_so_once_it_waits_for_nothing() {
    let lost = ptypes::Volume { has_lost: true, ..Default::default() };
    assert_eq!(remark(None, Some(&lost), 300), LOST);
    let waiting = ptypes::Volume { waiting_for: "its replicas".into(), ..lost };
    assert_eq!(remark(None, Some(&waiting), 300), "its replicas");
}

#[tokio::test]
async fn of_a_volume_whose_processes_were_all_killed_the_way_back_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path()).unwrap();
    root.create().unwrap();
    let mut record = VolumeRecord::new("demo", 1 << 30);
    record.add_replica(&root).unwrap();
    record.create(&root).unwrap();
    let left = r#"{"format":1,"name":"demo-e-0","binary":"","uuid":"1","state":"running",
        "args":["controller","--generation","4294967299","demo"],
        "process":{"pid":1,"start_time":0,"boot":"another"}}"#;
    std::fs::write(root.process("demo-e-0"), left).unwrap();
    let view = observe(&root, &record).await.unwrap();
    assert_eq!((view.state, view.engine_pid, view.generation), (Attachment::Detached, None, (1 << 32) + 3));
    assert!(view.remark.contains("longhornctl up demo"), "{}", view.remark);
    assert!(has_processes(&root, &record).unwrap());
}

#[tokio::test]
async fn a_stopped_volume_is_told_from_its_record_alone() {
    let dir = tempfile::tempdir().unwrap();
    let root = Root::at(dir.path()).unwrap();
    root.create().unwrap();
    let mut record = VolumeRecord::new("demo", 1 << 30);
    record.add_replica(&root).unwrap();
    record.add_replica(&root).unwrap();
    record.create(&root).unwrap();
    let authority = record.authority(&root);
    let generation = authority.issue_generation(Default::default()).unwrap();
    let epoch = lh_block::Epoch {
        generation,
        counter: 1,
        members: vec![record.replicas[1].name.clone()],
        id: lh_block::Instance(1),
        after: None,
        round: None,
    };
    authority.store_epoch(None, &epoch).unwrap();
    let view = observe(&root, &record).await.unwrap();
    assert_eq!((view.state, view.robustness), (Attachment::Detached, Robustness::Unknown));
    assert_eq!(view.replicas.iter().map(|r| r.mode).collect::<Vec<_>>(), [Mode::Err, Mode::Rw]);
    assert!(view.replicas.iter().all(|r| r.pid.is_none()) && view.engine_pid.is_none());
    assert_eq!(view.generation, 1 << 32);
    assert!(!has_processes(&root, &record).unwrap());
}
