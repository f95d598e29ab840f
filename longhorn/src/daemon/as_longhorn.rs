//! What Longhorn's command lines of an engine and a replica have beyond this program's own, so that lines written for
//! Longhorn work as they are.
//!
//! What has nothing to act on here is accepted and named in one line of the log. What would make the process do something
//! else than it does is refused, as a wrong command line: nobody is to believe that it was heeded.

use clap::CommandFactory;
use clap::error::ErrorKind;

/// Flags of Longhorn's `controller`. Switches are as Go's flag package takes them: `--name`, `--name=true`, `--name=false`.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct ControllerFlags {
    #[arg(long, hide = true)]
    current_size: Option<String>,
    #[arg(long, hide = true, value_parser = ["tcp"])]
    enable_backend: Vec<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    upgrade: Option<bool>,
    #[arg(long = "disableRevCounter", hide = true, num_args = 0..=1, require_equals = true,
        default_missing_value = "true")]
    disable_revision_counter: Option<bool>,
    #[arg(long, hide = true)]
    engine_replica_timeout: Option<u64>,
    #[arg(long, hide = true, value_parser = ["tcp", "unix"])]
    data_server_protocol: Option<String>,
    #[arg(long, hide = true)]
    file_sync_http_client_timeout: Option<u64>,
    #[arg(long, hide = true)]
    rebuild_sync_concurrent_limit: Option<u32>,
    #[arg(long = "salvageRequested", hide = true, num_args = 0..=1, require_equals = true,
        default_missing_value = "true")]
    salvage_requested: Option<bool>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    unmap_mark_snap_chain_removed: Option<bool>,
}

/// Flags of Longhorn's `replica`; switches as there.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub struct ReplicaFlags {
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    sync_agent: Option<bool>,
    #[arg(long, hide = true)]
    sync_agent_port_count: Option<u32>,
    #[arg(long = "disableRevCounter", hide = true, num_args = 0..=1, require_equals = true,
        default_missing_value = "true")]
    disable_revision_counter: Option<bool>,
    #[arg(long, hide = true, value_parser = ["tcp", "unix"])]
    data_server_protocol: Option<String>,
    #[arg(long, hide = true)]
    backing_file: Option<String>,
    #[arg(long, hide = true)]
    restore_from: Option<String>,
    #[arg(long, hide = true)]
    restore_name: Option<String>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    unmap_mark_disk_chain_removed: Option<bool>,
    #[arg(long, hide = true, num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    encrypted: Option<bool>,
}

/// What the help of both commands says at its end.
pub(super) const HELP: &str = "\
Longhorn's other flags are accepted where they have nothing to change here, and
named in the log; those that would make it do something else are refused.";

/// Why trims that mark snapshots are refused.
const NO_MARKS: &str =
    "an engine here marks no snapshot as removed when something is trimmed: `longhornctl snapshot rm` does";

impl ControllerFlags {
    /// Those that were given and have no effect.
    fn idle(&self) -> Vec<&'static str> {
        let named = [
            ("--current-size", self.current_size.is_some()),
            ("--enable-backend", !self.enable_backend.is_empty()),
            ("--upgrade", self.upgrade.is_some()),
            ("--disableRevCounter", self.disable_revision_counter.is_some()),
            ("--engine-replica-timeout", self.engine_replica_timeout.is_some()),
            ("--data-server-protocol", self.data_server_protocol.is_some()),
            ("--file-sync-http-client-timeout", self.file_sync_http_client_timeout.is_some()),
            ("--rebuild-sync-concurrent-limit", self.rebuild_sync_concurrent_limit.is_some()),
            ("--salvageRequested", self.salvage_requested.is_some()),
            ("--unmap-mark-snap-chain-removed", self.unmap_mark_snap_chain_removed.is_some()),
        ];
        given(&named)
    }

    /// The first that cannot be passed over, and what to do instead.
    fn refused(&self) -> Option<(&'static str, &'static str)> {
        let refusals = [
            (
                self.salvage_requested == Some(true),
                "--salvageRequested",
                "an engine starts from what is sure, and never guesses: `longhornctl salvage VOLUME` decides by epochs",
            ),
            (self.unmap_mark_snap_chain_removed == Some(true), "--unmap-mark-snap-chain-removed", NO_MARKS),
        ];
        first(&refusals)
    }

    /// Ends the process if a flag asks for something that is not done here; names those that change nothing.
    pub(super) fn heed(&self) {
        heed("controller", self.refused(), &self.idle());
    }
}

impl ReplicaFlags {
    fn idle(&self) -> Vec<&'static str> {
        let named = [
            ("--sync-agent", self.sync_agent.is_some()),
            ("--sync-agent-port-count", self.sync_agent_port_count.is_some()),
            ("--disableRevCounter", self.disable_revision_counter.is_some()),
            ("--data-server-protocol", self.data_server_protocol.is_some()),
            ("--backing-file", self.backing_file.is_some()),
            ("--restore-from", self.restore_from.is_some()),
            ("--restore-name", self.restore_name.is_some()),
            ("--unmap-mark-disk-chain-removed", self.unmap_mark_disk_chain_removed.is_some()),
            ("--encrypted", self.encrypted.is_some()),
        ];
        given(&named)
    }

    fn refused(&self) -> Option<(&'static str, &'static str)> {
        let names = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let refusals = [
            (
                names(&self.backing_file),
                "--backing-file",
                "backing images are not built: make the volume without one, and copy the image into it",
            ),
            (
                names(&self.restore_from) || names(&self.restore_name),
                "--restore-from and --restore-name",
                "backups are not built",
            ),
            (self.unmap_mark_disk_chain_removed == Some(true), "--unmap-mark-disk-chain-removed", NO_MARKS),
            (
                self.encrypted == Some(true),
                "--encrypted",
                "encryption is not built: a replica does not make room for a header of its own",
            ),
        ];
        first(&refusals)
    }

    /// As [`ControllerFlags::heed`].
    pub(super) fn heed(&self) {
        heed("replica", self.refused(), &self.idle());
    }
}

fn given(named: &[(&'static str, bool)]) -> Vec<&'static str> {
    named.iter().filter(|(_, is_given)| *is_given).map(|(name, _)| *name).collect()
}

fn first(refusals: &[(bool, &'static str, &'static str)]) -> Option<(&'static str, &'static str)> {
    refusals.iter().find(|(asked, ..)| *asked).map(|(_, name, instead)| (*name, *instead))
}

fn heed(command: &str, refused: Option<(&'static str, &'static str)>, idle: &[&'static str]) {
    if let Some((name, instead)) = refused {
        wrong(command, &format!("{name} is Longhorn's: {instead}"));
    }
    if !idle.is_empty() {
        tracing::warn!("without effect here: {}", idle.join(", "));
    }
}

/// Ends the process as for any wrong command line.
pub(super) fn wrong(command: &str, text: &str) -> ! {
    let mut program = super::Program::command();
    program.build();
    match program.find_subcommand_mut(command) {
        Some(command) => command.error(ErrorKind::ArgumentConflict, text).exit(),
        None => program.error(ErrorKind::ArgumentConflict, text).exit(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::daemon::{Command, Program};

    const CONTROLLER: &str =
        "longhorn controller --key-file /k --listen unix:/s --size 4096 --replica r=unix:/r";
    const REPLICA: &str = "longhorn --volume-name demo replica --replica-instance-name r --listen unix:/s \
        --data-listen unix:/d --key-file /k";

    fn controller(flags: &str) -> ControllerFlags {
        let line = format!("{CONTROLLER} {flags} demo");
        match Program::try_parse_from(line.split_whitespace()).unwrap().command {
            Command::Controller(args) => args.as_longhorn,
            other => panic!("{other:?}"),
        }
    }

    fn replica(flags: &str) -> ReplicaFlags {
        let line = format!("{REPLICA} {flags} /directory");
        match Program::try_parse_from(line.split_whitespace()).unwrap().command {
            Command::Replica(args) => args.as_longhorn,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_has_no_effect_is_named_and_nothing_else() {
        assert!(controller("").idle().is_empty() && replica("").idle().is_empty());
        let flags = controller(
            "--current-size 4096 --enable-backend tcp --upgrade --disableRevCounter --engine-replica-timeout 8 \
             --data-server-protocol tcp --file-sync-http-client-timeout 30 --rebuild-sync-concurrent-limit 1 \
             --frontend tgt-blockdev --snapshot-max-count 250 --snapshot-max-size 0",
        );
        assert_eq!((flags.idle().len(), flags.refused()), (8, None));
        let flags = replica(
            "--sync-agent=true --sync-agent-port-count 7 --disableRevCounter --data-server-protocol tcp \
             --snapshot-max-count 250 --snapshot-max-size 0",
        );
        assert_eq!((flags.idle().len(), flags.refused()), (4, None));
    }

    #[test]
    fn what_asks_for_something_else_is_refused_by_name() {
        for flag in ["--salvageRequested", "--unmap-mark-snap-chain-removed"] {
            assert_eq!(controller(flag).refused().map(|(name, _)| name), Some(flag));
            assert_eq!(controller(&format!("{flag}=true")).refused().map(|(name, _)| name), Some(flag));
            assert_eq!(controller(&format!("{flag}=false")).refused(), None);
        }
        for flag in ["--unmap-mark-disk-chain-removed", "--encrypted"] {
            assert_eq!(replica(flag).refused().map(|(name, _)| name), Some(flag));
            assert_eq!(replica(&format!("{flag}=false")).refused(), None);
        }
        assert!(replica("--backing-file /images/a").refused().is_some());
        assert!(replica("--restore-from s3://b --restore-name c").refused().is_some());
    }
}
