//! systemd, where it runs the host: what it is given to start volumes with, and how it starts an instance manager.
//!
//! A process and all that it starts stay in one control group, whatever sessions they leave. systemd ends the groups of a
//! log-in session and of a service with everything in them, and at shutdown does so before it unmounts file systems: a
//! volume's processes in there would end under a mounted file system. So the instance manager, whose children they all are, is
//! a service of its own, of which systemd ends nothing but the manager (`KillMode=process`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use control::host::Root;

use super::args::SystemdArgs;
use super::output::print;
use crate::tell::tell;

/// systemd runs this host if this is there (`sd_booted(3)`).
const BOOTED: &str = "/run/systemd/system";

/// The service that is an instance manager.
const MANAGER: &str = "longhorn-instance-manager.service";

/// Where an administrator's units lie, and then a distribution's.
const UNITS: [&str; 3] = ["/etc/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system"];

/// Where an administrator's rules of udev lie.
const RULES: &str = "/etc/udev/rules.d";

/// What `deploy/host` has, and where it goes.
const FILES: [(&str, &str, &str); 5] = [
    (UNITS[0], MANAGER, include_str!("../../../deploy/host/longhorn-instance-manager.service")),
    (UNITS[0], "longhorn-volumes.service", include_str!("../../../deploy/host/longhorn-volumes.service")),
    (UNITS[0], "longhorn-shutdown.service", include_str!("../../../deploy/host/longhorn-shutdown.service")),
    (UNITS[0], "longhorn-volume@.service", include_str!("../../../deploy/host/longhorn-volume@.service")),
    (RULES, "90-longhorn.rules", include_str!("../../../deploy/host/90-longhorn.rules")),
];

/// The programs' directory and the root as they stand in these.
const PROGRAMS: &str = "/usr/local/bin/longhorn";
const ROOT: &str = "/var/lib/longhorn";

/// What a manager is told by its environment.
const ENVIRONMENT: [&str; 5] =
    ["LONGHORN_LOG", "LONGHORN_QUEUES", "LONGHORN_UBLK_QUEUE_DEPTH", "LONGHORN_READS", "LONGHORN_REALTIME"];

/// What a manager that is no installed service is given: as [`MANAGER`] has it.
const PROPERTIES: [&str; 5] = [
    "KillMode=process",
    "OOMPolicy=continue",
    "TasksMax=infinity",
    "LimitMEMLOCK=infinity",
    "LimitNOFILE=524288",
];

/// `install systemd`: prints what makes systemd start volumes, or writes it.
pub(super) fn install(root: &Root, args: &SystemdArgs) -> Result<()> {
    let files = files(root)?;
    if !args.write && args.into.is_none() {
        return files.iter().try_for_each(|(path, text)| print(&format!("# {}\n{text}\n", path.display())));
    }
    let into = |path: &Path| match &args.into {
        Some(top) => top.join(path.strip_prefix("/").unwrap_or(path)),
        None => path.to_owned(),
    };
    let manager = into(&files[0].0);
    if let Some(other) = root_of(&manager).filter(|other| other != root.path()) {
        bail!(
            "{} starts the volumes of {}, and there is one such service: remove it first",
            manager.display(),
            other.display()
        );
    }
    let mut written = String::new();
    for (path, text) in &files {
        let path = into(path);
        let directory = path.parent().unwrap_or(&path);
        fs::create_dir_all(directory)
            .and_then(|()| fs::write(&path, text))
            .with_context(|| format!("{} cannot be written", path.display()))?;
        written += &format!("{}\n", path.display());
    }
    // All at once: they belong together, whatever becomes of the output.
    print(&written)?;
    tell!(
        "\n{}\n\
         For /etc/fstab:\n\
         \x20 /dev/longhorn/VOLUME /mnt/VOLUME ext4 _netdev,nofail,x-systemd.requires=longhorn-volume@VOLUME.service 0 2",
        next(args.into.as_deref(), Path::new(BOOTED).is_dir())
    );
    Ok(())
}

/// What has the host start volumes whose files these are: another one's, or one that systemd does not run, has none that could be told.
fn next(into: Option<&Path>, is_booted: bool) -> String {
    match (into, is_booted) {
        (Some(top), _) => format!(
            "To have volumes started by the host whose files these are:\n  systemctl --root {} enable longhorn-volumes",
            top.display()
        ),
        (None, true) => "To start volumes with the host from now on:\n  \
             systemctl daemon-reload && udevadm control --reload && systemctl enable --now longhorn-volumes"
            .to_owned(),
        (None, false) => "systemd does not run this host now, and nothing is started. For when it does:\n  \
             systemctl enable longhorn-volumes"
            .to_owned(),
    }
}

/// The files with this program's own place and this root in them.
fn files(root: &Root) -> Result<Vec<(PathBuf, String)>> {
    let programs = std::env::current_exe().context("this program's own path")?.with_file_name("longhorn");
    let (programs, root) = (plain(&programs)?, plain(root.path())?);
    let one = |(directory, name, text): (&str, &str, &str)| {
        // The root first: the programs may lie below a directory of its name.
        let text = text.replace(ROOT, "\0").replace(PROGRAMS, programs).replace('\0', root);
        (Path::new(directory).join(name), text)
    };
    Ok(FILES.into_iter().map(one).collect())
}

/// A path that means the same to systemd and udev without quotes.
fn plain(path: &Path) -> Result<&str> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/._-+@".contains(c);
    match path.to_str().filter(|text| text.chars().all(is_plain)) {
        Some(text) => Ok(text),
        None => {
            bail!("{} has characters that units cannot name as they are: use another path", path.display())
        }
    }
}

/// The root of the manager that the unit at this path starts, if there is such a unit.
fn root_of(unit: &Path) -> Option<PathBuf> {
    let text = fs::read_to_string(unit).ok()?;
    let start = text.lines().find_map(|line| line.strip_prefix("ExecStart="))?;
    let words: Vec<&str> = start.split_whitespace().collect();
    let at = words.iter().position(|word| *word == "--root")?;
    words.get(at + 1).map(PathBuf::from)
}

/// True if an installed service is the instance manager of this root.
pub(super) fn has_service(root: &Root) -> bool {
    UNITS.iter().any(|dir| root_of(&Path::new(dir).join(MANAGER)).is_some_and(|of| of == root.path()))
}

/// True if systemd runs this host, and would start anything: before the host stops, it refuses to.
pub(super) fn is_here() -> bool {
    let state = || Command::new("systemctl").arg("is-system-running").stdin(Stdio::null()).output();
    Path::new(BOOTED).is_dir() && !state().is_ok_and(|said| said.stdout.starts_with(b"stopping"))
}

/// Has systemd start the instance manager of a root, and waits until it is ready: by the installed service, or else as one that
/// is gone with its end.
///
/// # Errors
/// What systemd said.
pub(super) fn start_manager(root: &Root, program: &Path, log: &Path) -> Result<()> {
    if has_service(root) {
        let started = Command::new("systemctl").args(["start", MANAGER]).stdin(Stdio::null()).status();
        return match started.context("systemctl")? {
            status if status.success() => Ok(()),
            _ => bail!("{MANAGER} does not start: `systemctl status {MANAGER}` says why"),
        };
    }
    let mut command = Command::new("systemd-run");
    command.args(["--quiet", "--collect", "--service-type=notify"]);
    // The unit of a manager that died stays as long as its processes do.
    command.arg(format!("--unit=longhorn-instance-manager-{}", std::process::id()));
    command.arg(format!("--description=Longhorn instance manager of {}", root.path().display()));
    for property in PROPERTIES {
        command.arg(format!("--property={property}"));
    }
    for stream in ["StandardOutput", "StandardError"] {
        command.arg(format!("--property={stream}=append:{}", log.display()));
    }
    for name in ENVIRONMENT {
        if let Ok(value) = std::env::var(name) {
            command.arg(format!("--setenv={name}={value}"));
        }
    }
    command.arg("--").arg(program).args(["instance-manager", "--root"]).arg(root.path());
    let done = command.stdin(Stdio::null()).output().context("systemd-run")?;
    if !done.status.success() {
        bail!("systemd-run: {}", String::from_utf8_lossy(&done.stderr).trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::arguments::ROOT_VARIABLE;

    #[test]
    fn what_is_installed_is_deploys_with_other_paths() {
        let root = Root::unresolved(Path::new("/srv/longhorn"));
        let files = files(&root).unwrap();
        assert_eq!(files.len(), FILES.len());
        for (path, text) in &files {
            assert!(!text.contains(ROOT) && !text.contains(PROGRAMS), "{}: {text}", path.display());
        }
        assert!(files[0].1.contains("instance-manager --take-over --root /srv/longhorn\n"), "{}", files[0].1);
        assert!(files[1].1.contains("longhornctl --root /srv/longhorn up --all\n"), "{}", files[1].1);
        assert!(super::files(&Root::unresolved(Path::new("/srv/long horn"))).is_err());
    }

    #[test]
    fn nobody_is_told_to_do_what_cannot_be_done_here() {
        let live = next(None, true);
        assert!(live.contains("daemon-reload") && live.contains("enable --now"), "{live}");
        for (into, is_booted, enable) in [
            (None, false, "systemctl enable longhorn-volumes"),
            (Some(Path::new("/mnt/image")), true, "systemctl --root /mnt/image enable longhorn-volumes"),
        ] {
            let said = next(into, is_booted);
            assert!(said.ends_with(enable) && !said.contains("reload"), "{said}");
        }
    }

    #[test]
    fn a_manager_that_is_no_service_is_given_what_the_service_has() {
        let unit = FILES[0].2;
        for property in PROPERTIES {
            assert!(unit.lines().any(|line| line == property), "{property}");
        }
    }

    #[test]
    fn a_manager_is_told_whatever_its_processes_read_in_their_environment() {
        let program = crate::daemon::Program::command();
        for name in ["controller", "replica"] {
            let arguments = program.find_subcommand(name).unwrap().get_arguments();
            // The root is in the manager's own command line, and their own control sockets are in theirs.
            let read =
                arguments.filter_map(|argument| argument.get_env()?.to_str()).filter(|n| *n != ROOT_VARIABLE);
            let untold: Vec<&str> = read.filter(|name| !ENVIRONMENT.contains(name)).collect();
            assert_eq!(untold, [""; 0], "{name}");
        }
        let told = FILES[0].2.lines().find(|line| line.starts_with("# LONGHORN_")).unwrap();
        assert_eq!(told.trim_start_matches("# "), ENVIRONMENT.join(", "));
    }

    #[test]
    fn of_a_unit_it_is_known_whose_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let unit = dir.path().join(MANAGER);
        assert_eq!(root_of(&unit), None);
        fs::write(&unit, FILES[0].2).unwrap();
        assert_eq!(root_of(&unit), Some(ROOT.into()));
    }
}
