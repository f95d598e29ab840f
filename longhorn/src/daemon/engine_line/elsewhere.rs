//! Words of Longhorn's engine command line for what is otherwise here, or not at all. Each is refused by a sentence that says
//! what to use instead, whatever comes behind it: a script that was written for Longhorn is told at that line.

use clap::Subcommand;

use crate::daemon::as_longhorn::wrong;

/// Anything that may stand behind such a word.
#[derive(Debug, clap::Args)]
#[command(disable_help_flag = true)]
pub(in crate::daemon) struct Whatever {
    #[arg(hide = true, trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// The words. Help does not list them.
#[derive(Debug, Subcommand)]
pub(in crate::daemon) enum Elsewhere {
    #[command(hide = true)]
    SyncAgent(Whatever),
    #[command(hide = true)]
    SyncAgentServerReset(Whatever),
    #[command(hide = true, alias = "start")]
    StartWithReplicas(Whatever),
    #[command(hide = true, alias = "backups")]
    Backup(Whatever),
    #[command(hide = true)]
    SystemBackup(Whatever),
    #[command(hide = true)]
    Journal(Whatever),
    #[command(hide = true)]
    Profiler(Whatever),
    #[command(hide = true, alias = "export")]
    ExportVolume(Whatever),
}

impl Elsewhere {
    /// The word, and what to do instead.
    const fn told(&self) -> (&'static str, &'static str) {
        match self {
            Self::SyncAgent(_) => (
                "sync-agent",
                "a replica needs none beside it: its engine copies and folds over the data connection, and `longhorn replica` answers \
                 what else Longhorn's agents are asked",
            ),
            Self::SyncAgentServerReset(_) => {
                ("sync-agent-server-reset", "nothing is left over from an operation that was broken off")
            }
            Self::StartWithReplicas(_) => (
                "start-with-replicas",
                "an engine starts with those of its command line: `longhorn controller --replica NAME=ADDRESS ... VOLUME`, or \
                 `longhornctl up VOLUME`, which starts replicas, too; to one that runs `longhorn add ADDRESS` adds a replica",
            ),
            Self::Backup(_) => (
                "backup",
                "backups are not built yet: `longhornctl snapshot export VOLUME NAME FILE` writes a snapshot's bytes into a file, \
                 and `longhornctl replica export DIR FILE` those of a replica that nothing uses",
            ),
            Self::SystemBackup(_) => (
                "system-backup",
                "it is not built yet: `kubectl -n longhorn-system get volumes.longhorn.io,settings.longhorn.io -o yaml` prints what a \
                 cluster has",
            ),
            Self::Journal(_) => (
                "journal",
                "no journal is kept: `longhornctl status VOLUME --watch` shows what a volume does, and the engine's log below ROOT/log \
                 what it did",
            ),
            Self::Profiler(_) => (
                "profiler",
                "these programs open no port for one: `perf top -p PID` shows where a process spends its time, and `longhornctl status \
                 VOLUME` names the processes",
            ),
            Self::ExportVolume(_) => (
                "export-volume",
                "`longhornctl snapshot export VOLUME NAME FILE` writes a snapshot's bytes into a file, and `longhorn snapshot clone` \
                 fills another volume with them",
            ),
        }
    }

    /// Ends the process as for any wrong command line.
    pub(super) fn refuse(&self) -> ! {
        let (word, instead) = self.told();
        wrong(word, &format!("`longhorn {word}` is Longhorn's: {instead}"))
    }
}
