//! `longhorn controller`: a volume's engine.

mod activity;
mod authority;
mod clients;
mod cloning;
mod face;
mod fill;
mod queues;
mod refusal;
mod relay;
mod run;
mod scrub;
mod serve;
mod show;
mod stay;
mod waits;

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Result;
use control::host::{IO_TIMEOUT_SECONDS, Root, SNAPSHOT_COUNT, VolumeRecord, engine_name};
use datapath::message::QUEUES_MAX;
use lh_block::{Address, Quorum};

use queues::{DEPTH, UBLK_DEPTH_MIN};
pub(super) use run::run;
pub(super) use stay::{EndStayArgs, run as end_stay};

use super::as_longhorn::{self, ControllerFlags, wrong};
use super::engine_line::Target;
use super::front;
use super::size::{size, size_or_none};
use super::{GivesUp, key_of};
use crate::arguments::{
    Checksum, DEFAULT_ROOT, Frontend, ROOT_VARIABLE, Reads, Realtime, block_size, control_address,
    process_name, quorum, root_path, seconds, volume_name,
};

/// Arguments of an engine.
#[derive(Debug, clap::Args, PartialEq, Eq)]
#[command(after_help = as_longhorn::HELP)]
pub struct ControllerArgs {
    /// Name of the volume
    #[arg(value_parser = volume_name)]
    pub volume: String,
    /// Name of this engine
    #[arg(long, value_parser = process_name, value_name = "NAME")]
    pub engine_instance_name: Option<String>,
    /// A replica and where it listens for the engine, unix:PATH or tcp:ADDRESS:PORT; once for each
    #[arg(long = "replica", value_parser = replica_address, value_name = "NAME=ADDRESS")]
    pub replicas: Vec<(String, Address)>,
    /// Reach replicas, and relays, over TCP without encryption; with --listen on TCP and no --tls-dir, obey whoever reaches it
    #[arg(long)]
    pub insecure: bool,
    /// Serve the volume to relays that prove its key, unix:PATH or tcp:ADDRESS:PORT
    #[arg(long, value_name = "ADDRESS")]
    pub relay_listen: Option<Address>,
    /// Be a relay: show the volume here and pass every request on to its engine, which serves relays there
    #[arg(long, value_name = "ADDRESS")]
    pub relay_from: Option<Address>,
    /// Which stay of the volume on this host this is: a device that another one left behind is taken away, whoever uses it
    #[arg(long, value_parser = process_name, value_name = "WORD")]
    pub stay: Option<String>,
    /// Size of the volume in bytes [default: what its record below the root says]
    #[arg(long, value_parser = size)]
    pub size: Option<u64>,
    /// Logical block of the device in bytes
    #[arg(long, value_parser = block_size, default_value = "512")]
    pub block_size: u32,
    /// How the volume is shown
    #[arg(long, value_enum, default_value_t = Frontend::Auto)]
    pub frontend: Frontend,
    /// Serve the NBD export or the iSCSI target on this TCP address
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub frontend_listen: Option<SocketAddr>,
    /// Who must agree before a change of the membership counts
    #[arg(long, value_parser = quorum(), default_value_t = Quorum::Any)]
    pub quorum: Quorum,
    /// How long requests wait for a replica, in seconds; 0 for ever
    #[arg(long, default_value_t = IO_TIMEOUT_SECONDS, value_parser = seconds, value_name = "SECONDS")]
    pub io_timeout: u64,
    /// Most snapshots, removed ones not counted
    #[arg(long, default_value_t = SNAPSHOT_COUNT, value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=SNAPSHOT_COUNT.into()))]
    pub snapshot_max_count: u32,
    /// Most bytes of all snapshots together; 0: any
    #[arg(long, default_value_t = 0, value_parser = size_or_none, value_name = "SIZE")]
    pub snapshot_max_size: u64,
    /// Which checksums reads are compared with
    #[arg(long, value_enum, default_value_t = Checksum::Snapshots)]
    pub checksum: Checksum,
    /// Attachment number x 2^32 + restart number; without it, the highest that the replicas know, plus one
    #[arg(long, value_name = "NUMBER")]
    pub generation: Option<u64>,
    /// The directory of the volume's record, whose authority stores epochs [default: below the root, if there is one]
    #[arg(long, value_name = "DIR")]
    pub authority: Option<PathBuf>,
    /// The volume's key, 32 bytes [default: that below the root]
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
    /// Where to listen for control (gRPC): unix:PATH, or on TCP ADDRESS:PORT, with --tls-dir or --insecure [default: its socket
    /// below the root]
    #[arg(long, value_parser = control_address, value_name = "ADDRESS")]
    pub listen: Option<Address>,
    /// On TCP obey whoever has a certificate of ca.crt; tls.crt and tls.key are the own ones [default: /tls-files, if there]
    #[arg(long, value_name = "DIR")]
    pub tls_dir: Option<PathBuf>,
    /// Device queues, each a thread; 0: by the number of processors
    #[arg(long, env = "LONGHORN_QUEUES", default_value_t = 0, value_name = "N",
        value_parser = clap::value_parser!(u8).range(..=i64::from(QUEUES_MAX)))]
    pub queues: u8,
    /// Requests of a queue of a ublk device at a time, else 128; a device that another engine left behind keeps its own
    #[arg(long, env = "LONGHORN_UBLK_QUEUE_DEPTH", value_name = "N",
        value_parser = clap::value_parser!(u16).range(i64::from(UBLK_DEPTH_MIN)..=i64::from(DEPTH)))]
    pub ublk_queue_depth: Option<u16>,
    /// Who reads the blocks that a replica on this host has; else `here`
    #[arg(long, env = "LONGHORN_READS", value_enum, value_name = "WHERE")]
    pub reads: Option<Reads>,
    /// When threads are real time, to which the kernel gives memory where others wait; else `pressure`
    #[arg(long, env = "LONGHORN_REALTIME", value_enum, value_name = "WHEN")]
    pub realtime: Option<Realtime>,
    /// The root that the volume belongs to
    #[arg(long, env = ROOT_VARIABLE, default_value = DEFAULT_ROOT, value_parser = root_path(), value_name = "DIR")]
    pub root: PathBuf,
    /// Of Longhorn's command line.
    #[command(flatten)]
    pub as_longhorn: ControllerFlags,
}

impl ControllerArgs {
    /// With what Longhorn's command line says before the word `controller`.
    pub(super) fn of(mut self, target: &Target) -> Self {
        self.as_longhorn.heed();
        if let Some(listen) = &self.listen {
            front::check("controller", listen, self.tls_dir.as_deref(), self.insecure);
        }
        if !target.volume.is_empty() && target.volume != self.volume {
            let text = format!("--volume-name {} and the volume {} are not one", target.volume, self.volume);
            wrong("controller", &text);
        }
        if self.engine_instance_name.is_none() && !target.instance.is_empty() {
            match process_name(&target.instance) {
                Ok(name) => self.engine_instance_name = Some(name),
                Err(e) => wrong("controller", &e.to_string()),
            }
        }
        if let Ok(root) = Root::at(&self.root) {
            self.find(&root);
        }
        self
    }

    /// With what the root has of the volume, where nothing else was named.
    fn find(&mut self, root: &Root) {
        self.key_file.get_or_insert_with(|| root.key(&self.volume));
        // Another host has the record of what is relayed here.
        let record = VolumeRecord::load(root, &self.volume).ok().filter(|_| self.relay_from.is_none());
        let Some(record) = record else { return };
        let own = root.volume(&self.volume);
        if *self.authority.get_or_insert_with(|| own.clone()) == own {
            self.size.get_or_insert(record.size);
        }
    }

    /// The engine's name: that of its process, and of its socket.
    fn name(&self) -> String {
        self.engine_instance_name.clone().unwrap_or_else(|| engine_name(&self.volume))
    }

    /// Queues of the frontend. Engine, replicas and whoever uses the volume share the processors: a second queue pays where there
    /// are four.
    fn queue_count(&self) -> u8 {
        if self.queues != 0 {
            // Relays have one of their own.
            return self.queues.min(QUEUES_MAX - u8::from(self.relay_listen.is_some()));
        }
        let processors = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        u8::try_from((processors / 2).clamp(1, 4)).unwrap_or(1)
    }

    /// The volume's key.
    ///
    /// # Errors
    /// It cannot be read, which another start would meet again unless the system has only been short of something.
    fn key(&self) -> Result<[u8; 32]> {
        let Some(path) = &self.key_file else {
            return Err(GivesUp("an engine needs --key-file: the volume's key".to_owned()).into());
        };
        key_of(path)
    }

    /// The command line that means these arguments, for a process that an instance manager starts.
    pub fn command_line(&self) -> Vec<String> {
        let mut line = vec!["controller".to_owned()];
        let mut option = |name: &str, value: String| line.extend([format!("--{name}"), value]);
        if let Some(name) = &self.engine_instance_name {
            option("engine-instance-name", name.clone());
        }
        if let Some(size) = self.size {
            option("size", size.to_string());
        }
        option("block-size", self.block_size.to_string());
        option("frontend", self.frontend.to_string());
        if let Some(address) = self.frontend_listen {
            option("frontend-listen", address.to_string());
        }
        option("quorum", self.quorum.to_string());
        option("io-timeout", self.io_timeout.to_string());
        option("snapshot-max-count", self.snapshot_max_count.to_string());
        option("snapshot-max-size", self.snapshot_max_size.to_string());
        if self.checksum == Checksum::Full {
            option("checksum", self.checksum.to_string());
        }
        if let Some(generation) = self.generation {
            option("generation", generation.to_string());
        }
        if let Some(dir) = &self.authority {
            option("authority", dir.display().to_string());
        }
        if let Some(file) = &self.key_file {
            option("key-file", file.display().to_string());
        }
        if let Some(address) = &self.listen {
            option("listen", address.to_string());
        }
        if let Some(directory) = &self.tls_dir {
            option("tls-dir", directory.display().to_string());
        }
        if self.queues != 0 {
            option("queues", self.queues.to_string());
        }
        if let Some(depth) = self.ublk_queue_depth {
            option("ublk-queue-depth", depth.to_string());
        }
        if let Some(place) = self.reads {
            option("reads", place.to_string());
        }
        if let Some(when) = self.realtime {
            option("realtime", when.to_string());
        }
        option("root", self.root.display().to_string());
        if let Some(address) = &self.relay_listen {
            option("relay-listen", address.to_string());
        }
        if let Some(stay) = &self.stay {
            option("stay", stay.clone());
        }
        if let Some(address) = &self.relay_from {
            option("relay-from", address.to_string());
        }
        for (name, address) in &self.replicas {
            option("replica", format!("{name}={address}"));
        }
        if self.insecure {
            line.push("--insecure".to_owned());
        }
        line.push(self.volume.clone());
        line
    }
}

/// Why replicas over TCP have to be asked for twice.
const UNENCRYPTED: &str = "replicas over TCP are reached without encryption: whoever is on the network between sees and may \
    change the volume's bytes; give --insecure if that network is your own";

/// `NAME=unix:PATH` or `NAME=tcp:ADDRESS:PORT`.
fn replica_address(text: &str) -> Result<(String, Address), String> {
    let Some((name, address)) = text.split_once('=') else {
        return Err(format!(
            "{text:?} is not NAME=ADDRESS: epochs name their members, and an address may be another replica's by now; \
             the name is what the replica has as --replica-instance-name"
        ));
    };
    // Longhorn's spelling.
    let address =
        address.strip_prefix("tcp://").map_or_else(|| address.to_owned(), |rest| format!("tcp:{rest}"));
    let name = process_name(name).map_err(|e| e.to_string())?;
    Ok((name, address.parse()?))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use clap::Parser;
    use control::front::Front;
    use lh_block::Generation;
    use lh_cluster::agent::{EngineStart, Reach, engine_command};
    use lh_cluster::api::{EngineSpec, Int64Text};

    use super::*;
    use crate::daemon::{Command, Program};

    #[test]
    fn a_replica_is_named_and_its_address_may_be_spelt_as_longhorn_does() {
        let told = Ok(("r1".to_owned(), Address::Tcp("10.0.0.1:10000".parse().unwrap())));
        assert_eq!(replica_address("r1=tcp://10.0.0.1:10000"), told);
        assert_eq!(replica_address("r1=tcp:10.0.0.1:10000"), told);
        let refused = replica_address("tcp://10.0.0.1:10000").unwrap_err();
        assert!(refused.contains("NAME=") && refused.contains("--replica-instance-name"), "{refused}");
    }

    fn composed() -> ControllerArgs {
        ControllerArgs {
            volume: "demo".into(),
            engine_instance_name: Some("demo-e-0".into()),
            replicas: vec![
                ("demo-r-1".into(), Address::Unix("/r/1.sock".into())),
                ("demo-r-2".into(), Address::Unix("/r/a=2.sock".into())),
                ("demo-r-3".into(), Address::Tcp("[::1]:10000".parse().unwrap())),
            ],
            insecure: true,
            relay_listen: Some(Address::Tcp("10.0.0.1:10001".parse().unwrap())),
            stay: Some("1700000000".into()),
            relay_from: Some(Address::Unix("/r/run/demo-e-0.relay.sock".into())),
            size: Some(1 << 30),
            block_size: 4096,
            frontend: Frontend::NbdServer,
            frontend_listen: Some("127.0.0.1:10809".parse().unwrap()),
            quorum: Quorum::Majority,
            io_timeout: 0,
            snapshot_max_count: 7,
            snapshot_max_size: 1 << 31,
            checksum: Checksum::Full,
            generation: Some(3 << 32),
            authority: Some("/r/volumes/demo".into()),
            key_file: Some("/r/volumes/demo/key".into()),
            listen: Some(Address::Tcp("127.0.0.1:9501".parse().unwrap())),
            tls_dir: Some("/tls".into()),
            queues: 2,
            ublk_queue_depth: Some(16),
            reads: Some(Reads::Sent),
            realtime: Some(Realtime::Always),
            root: "/r".into(),
            as_longhorn: ControllerFlags::default(),
        }
    }

    #[test]
    fn a_composed_command_line_means_what_it_was_made_from() {
        let args = composed();
        let line = args.command_line();
        assert_eq!(line.first().map(String::as_str), Some("controller"));
        assert_eq!(line.last().map(String::as_str), Some("demo"));
        let parsed = Program::try_parse_from(std::iter::once("longhorn".to_owned()).chain(line)).unwrap();
        assert!(matches!(parsed.command, Command::Controller(parsed) if parsed == args));
    }

    /// What a class asks for has its bounds where the command line is made: an engine that refused it would never start.
    #[test]
    fn an_engine_takes_whatever_queues_a_cluster_asks_for() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::at(place.path()).unwrap();
        let fewest = (1, Some(UBLK_DEPTH_MIN));
        for (wish, taken) in [(1, fewest), (i64::MAX, (QUEUES_MAX, Some(DEPTH)))] {
            let args = in_a_cluster(&root, |spec| {
                (spec.ublk_number_of_queue, spec.ublk_queue_depth) = (wish, wish);
            });
            assert_eq!((args.queues, args.ublk_queue_depth), taken);
        }
    }

    /// What a manager starts, by a volume's spec.
    fn in_a_cluster(root: &Root, change: impl Fn(&mut EngineSpec)) -> ControllerArgs {
        let mut spec = EngineSpec {
            volume_name: "demo".into(),
            volume_size: Int64Text(1 << 30),
            ..EngineSpec::default()
        };
        spec.replica_address_map.insert("demo-r-1".into(), "unix:/r/1.sock".into());
        change(&mut spec);
        let generation = Generation { attachment: 1, restart: 0 };
        let start = EngineStart { name: "demo-e-0", spec: &spec, generation, stay: "1" };
        let line = engine_command(root, Path::new("/run/a.sock"), Reach::ThisMachine, &start);
        let parsed = Program::try_parse_from(std::iter::once("longhorn".to_owned()).chain(line)).unwrap();
        let Command::Controller(args) = parsed.command else { panic!("it is no engine's") };
        args
    }

    /// An engine that has been let go of its reservations lets in who was shut out.
    #[test]
    fn a_target_has_a_place_for_its_reservations_wherever_it_has_an_authority() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::at(place.path()).unwrap();
        let kept = |args: &ControllerArgs| show::Wish::of(args, "demo-e-0", &root).reservations;
        let directory = root.volume("demo");
        std::fs::create_dir_all(&directory).unwrap();
        let expected = Some(Root::reservations(&directory));
        assert_eq!(
            kept(&in_a_cluster(&root, |spec| spec.frontend = lh_cluster::api::Frontend::Iscsi)),
            expected
        );
        let host = ControllerArgs { authority: Some(directory), ..composed() };
        assert_eq!(kept(&host), expected);
        assert_eq!(kept(&ControllerArgs { authority: None, ..composed() }), None);
    }

    /// As somebody types it who wants to see the volume that `up` has made here.
    #[test]
    fn an_engine_that_is_told_no_place_listens_where_longhornctl_looks() {
        let place = tempfile::tempdir().unwrap();
        let root = Root::at(place.path()).unwrap();
        root.create().unwrap();
        let at = |line: &str| {
            let line = format!("longhorn controller --root {} {line}", place.path().display());
            let parsed = Program::try_parse_from(line.split_whitespace()).unwrap();
            let Command::Controller(args) = parsed.command else { panic!("it is no engine's") };
            match serve::fronts(&args, &args.name(), &root).unwrap().as_slice() {
                [Front::Unix(socket)] => socket.clone(),
                other => panic!("{line}: {other:?}"),
            }
        };
        assert_eq!(at("demo"), root.control_socket("demo-e-0"));
        assert_eq!(at("--engine-instance-name own demo"), root.control_socket("own"));
        let named = place.path().join("s");
        assert_eq!(at(&format!("--listen unix:{} demo", named.display())), named);
    }

    /// An engine that panics is started again for ever.
    #[test]
    fn an_engine_has_no_more_replicas_and_queues_than_it_has_room_for() {
        let all = ControllerArgs { queues: QUEUES_MAX, ..composed() };
        assert_eq!(all.queue_count(), QUEUES_MAX - 1, "one is for relays");
        assert_eq!(ControllerArgs { relay_listen: None, ..all }.queue_count(), QUEUES_MAX);
        assert!(run::check_count(20).is_ok());
        assert!(run::check_count(21).unwrap_err().to_string().contains("at most 20"));
        assert!(run::check_count(0).unwrap_err().to_string().contains("--replica"));
    }
}
