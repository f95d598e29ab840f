//! What both command lines share: how values are written.

use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use clap::ValueEnum;
use clap::builder::{PathBufValueParser, PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use lh_block::{Address, NameError, Quorum};
use serde::Serialize;

use crate::tell::tell;

/// Where everything lies unless `--root` or `LONGHORN_ROOT` says otherwise.
pub const DEFAULT_ROOT: &str = "/var/lib/longhorn";

/// The environment variable that names another one.
pub const ROOT_VARIABLE: &str = "LONGHORN_ROOT";

/// The path of a root.
pub fn root_path() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|path| match path.to_str() {
        Some(_) => Ok(path),
        None => {
            Err("its path is not UTF-8, and records and addresses have to name it: use another directory")
        }
    })
}

/// Parses the command line, or ends the process. Where an option has its value from a variable, the variable is named: nobody has
/// given the option, which is all that clap names.
///
/// # Errors
/// What is left to say of a command line.
pub fn parse<P: clap::Parser>() -> Result<P, clap::Error> {
    P::try_parse().map_err(|e| {
        let mut program = P::command();
        // So that options of all commands are there.
        program.build();
        let words: Vec<OsString> = std::env::args_os().collect();
        match variable(&e, &program, &|name| std::env::var_os(name), &words) {
            None => e,
            Some((name, true)) => {
                let text =
                    format!("{name} is set and empty: give it a value, or take it away (`unset {name}`)");
                program.error(ErrorKind::InvalidValue, text)
            }
            Some((name, false)) => program.error(ErrorKind::InvalidValue, of_variable(&e, &name)),
        }
    })
}

/// Ends the process with what is to say of its command line: help, the version, or what is wrong. Help that is asked for is a
/// result, and one that nobody is given has failed.
pub fn end(e: &clap::Error) -> ! {
    let printed = e.print();
    let unread = printed.err().filter(|why| !e.use_stderr() && why.kind() != std::io::ErrorKind::BrokenPipe);
    let Some(why) = unread else { std::process::exit(e.exit_code()) };
    tell!("error: standard output takes nothing: {why}");
    std::process::exit(1)
}

/// The variable from which the option that is complained of has its value, and whether that is empty.
fn variable(
    e: &clap::Error,
    program: &clap::Command,
    value: &impl Fn(&OsStr) -> Option<OsString>,
    words: &[OsString],
) -> Option<(String, bool)> {
    let Some(ContextValue::String(option)) = e.get(ContextKind::InvalidArg) else { return None };
    let own = program.get_arguments().filter(|arg| arg.to_string() == *option);
    let of_environment = own.filter(|arg| !is_given(arg, words));
    let mut found = of_environment.filter_map(|arg| Some((arg.get_env()?, value(arg.get_env()?)?)));
    match found.next() {
        Some((name, value)) => Some((name.to_string_lossy().into_owned(), value.is_empty())),
        None => program.get_subcommands().find_map(|command| variable(e, command, value, words)),
    }
}

/// True if the option is on the command line.
fn is_given(arg: &clap::Arg, words: &[OsString]) -> bool {
    let Some(option) = arg.get_long().map(|long| format!("--{long}")) else { return false };
    words.iter().any(|word| {
        let word = word.to_string_lossy();
        word.strip_prefix(option.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('='))
    })
}

/// What clap says of an option's value, said of the variable that has it.
fn of_variable(e: &clap::Error, name: &str) -> String {
    let text = e.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let (text, _) = text.split_once("\n\nFor more information").unwrap_or((text, ""));
    match e.get(ContextKind::InvalidArg) {
        Some(ContextValue::String(option)) => text
            .replace(&format!("for '{option}'"), &format!("for {name}, in the environment"))
            .trim_end()
            .to_owned(),
        _ => text.to_owned(),
    }
}

/// The port of iSCSI (RFC 7143, 13).
pub const ISCSI_PORT: u16 = 3260;

/// Where an iSCSI target listens unless it is told: for this host alone.
pub const ISCSI_HERE: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), ISCSI_PORT);

/// How a volume is shown. Only what this build has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Frontend {
    /// The best of ublk, nbd, iscsi and fuse that this host has
    // Longhorn's name for a block device.
    #[value(alias = "tgt-blockdev")]
    Auto,
    /// A block device, /dev/longhorn/VOLUME, through ublk
    Ublk,
    /// A block device, /dev/longhorn/VOLUME, through the kernel's NBD client
    Nbd,
    /// A block device, /dev/longhorn/VOLUME, through the host's iSCSI initiator
    Iscsi,
    /// A block device, /dev/longhorn/VOLUME, through FUSE and a loop device
    Fuse,
    /// No device: an NBD export for QEMU, nbd-client or libnbd, on a unix socket unless told where to listen
    NbdServer,
    /// No device: an iSCSI target, on 127.0.0.1:3260 for this host alone unless told where to listen
    #[value(alias = "tgt-iscsi")]
    IscsiTarget,
    /// The engine runs, nothing is shown
    None,
}

impl Frontend {
    /// The port of its protocol, if it serves one over TCP.
    pub const fn port(self) -> Option<u16> {
        match self {
            Self::NbdServer => Some(nbd_frontend::proto::DEFAULT_PORT),
            Self::IscsiTarget => Some(ISCSI_PORT),
            Self::Auto | Self::Ublk | Self::Nbd | Self::Iscsi | Self::Fuse | Self::None => None,
        }
    }

    /// The volume is a block device of this host.
    pub const fn gives_a_device(self) -> bool {
        match self {
            Self::Auto | Self::Ublk | Self::Nbd | Self::Iscsi | Self::Fuse => true,
            Self::NbdServer | Self::IscsiTarget | Self::None => false,
        }
    }

    /// Where it listens on TCP unless it is told.
    pub const fn usual_address(self) -> Option<SocketAddr> {
        match self {
            Self::IscsiTarget => Some(ISCSI_HERE),
            _ => None,
        }
    }

    /// As written on the command line and in records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Ublk => "ublk",
            Self::Nbd => "nbd",
            Self::Iscsi => "iscsi",
            Self::Fuse => "fuse",
            Self::NbdServer => "nbd-server",
            Self::IscsiTarget => "iscsi-target",
            Self::None => "none",
        }
    }
}

impl std::fmt::Display for Frontend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Who reads the blocks that a replica on the engine's host has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Reads {
    /// The engine, in the replica's files; what it cannot read there it asks for
    #[default]
    Here,
    /// The replica, which is sent every read
    Sent,
}

impl std::fmt::Display for Reads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Here => "here",
            Self::Sent => "sent",
        })
    }
}

/// When the threads of a volume's processes are of the real-time class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Realtime {
    /// While the machine is short of memory
    #[default]
    Pressure,
    /// For machines that swap to their own volumes: no thread ever has to wait for what it writes out
    Always,
    /// Under memory pressure a volume may wait for itself
    Never,
}

impl std::fmt::Display for Realtime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Pressure => "pressure",
            Self::Always => "always",
            Self::Never => "never",
        })
    }
}

/// Which reads are compared with checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Checksum {
    /// None: only scrubs compare
    #[default]
    Snapshots,
    /// All of what snapshots hold: a rotten block is answered by another replica, and repaired
    Full,
}

impl std::fmt::Display for Checksum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Snapshots => "snapshots",
            Self::Full => "full",
        })
    }
}

/// Who must agree before a change of the membership counts, with what each choice means.
pub fn quorum() -> impl TypedValueParser<Value = Quorum> {
    let value = |quorum: Quorum| {
        PossibleValue::new(quorum.as_str()).help(match quorum {
            Quorum::Any => {
                "The members left: the volume runs as long as one replica does; if its host lost its power, without what was not flushed"
            }
            Quorum::Majority => "A majority of all replicas: fewer stop the volume",
            Quorum::Unsafe => "Nobody, as in Longhorn: acknowledged writes may be lost",
        })
    };
    PossibleValuesParser::new(Quorum::ALL.map(value)).try_map(|word| word.parse())
}

/// A volume's name.
///
/// # Errors
/// A name that is not allowed.
pub fn volume_name(text: &str) -> Result<String, NameError> {
    lh_block::check_name("volume", text).map(|()| text.to_owned())
}

/// A snapshot's name.
///
/// # Errors
/// A name that is not allowed.
pub fn snapshot_name(text: &str) -> Result<String, NameError> {
    lh_block::check_name("snapshot", text).map(|()| text.to_owned())
}

/// The name of a snapshot that there is already. Longhorn's may be longer than ours, and have spaces and other letters: whether there is
/// one of that name the volume knows.
///
/// # Errors
/// There is no name.
pub fn known_snapshot(text: &str) -> Result<String, String> {
    if text.is_empty() { Err("a snapshot has a name".to_owned()) } else { Ok(text.to_owned()) }
}

/// A label of a snapshot: `KEY=VALUE`.
///
/// # Errors
/// There is no key.
pub fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err(format!("{text:?} is not KEY=VALUE")),
    }
}

/// A size that may be 0, which stands for none.
///
/// # Errors
/// It is neither 0 nor a size.
pub fn size_or_none(text: &str) -> Result<u64, lh_block::SizeError> {
    if text == "0" { Ok(0) } else { lh_block::parse_size(text) }
}

/// A number of seconds. More than 136 years are refused: a moment so far away is none that a clock can tell.
///
/// # Errors
/// No whole number, or one that is too large.
pub fn seconds(text: &str) -> Result<u64, String> {
    match text.parse::<u32>() {
        Ok(seconds) => Ok(seconds.into()),
        Err(_) => {
            Err(format!("{text:?} is not a number of seconds: write a whole one from 0 to {}", u32::MAX))
        }
    }
}

/// The name of a replica or another process.
///
/// # Errors
/// A name that is not allowed.
pub fn process_name(text: &str) -> Result<String, NameError> {
    lh_block::check_process_name("process", text).map(|()| text.to_owned())
}

/// The name of a container image, or its beginning: what may stand in a manifest without quotes.
///
/// # Errors
/// Anything else than letters, digits and `._-/:@`, beginning with a letter or digit.
pub fn image_name(text: &str) -> Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-/:@".contains(c);
    match text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(plain) {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} is not the name of an image, such as registry.example/longhorn:1.0")),
    }
}

/// The name of a Secret in Kubernetes (an RFC 1123 subdomain).
///
/// # Errors
/// Anything else.
pub fn secret_name(text: &str) -> Result<String, String> {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
    let end = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    match text.starts_with(end) && text.ends_with(end) && text.len() <= 253 && text.chars().all(inner) {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} is not the name of a Secret: small letters, digits, - and .")),
    }
}

/// A logical block: 512 or 4096 bytes.
///
/// # Errors
/// Anything else.
pub fn block_size(text: &str) -> Result<u32, String> {
    match text {
        "512" => Ok(512),
        "4096" => Ok(4096),
        _ => Err(format!("{text:?} is not a block size: 512 and 4096 are")),
    }
}

/// Where a frontend listens on TCP: an address, and a port unless it is the protocol's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    address: IpAddr,
    port: Option<u16>,
}

impl Listen {
    /// The address with its own port or this one.
    pub fn with_default(self, port: u16) -> SocketAddr {
        SocketAddr::new(self.address, self.port.unwrap_or(port))
    }
}

/// `ADDRESS[:PORT]`, an IPv6 address with a port in brackets.
///
/// # Errors
/// Not an address, nor a name of this host.
pub fn listen_address(text: &str) -> Result<Listen, String> {
    // A number alone would be an address, too: 10809 is 0.0.42.57.
    let port = text.strip_prefix(':').unwrap_or(text);
    if !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit()) {
        return Err(match port.parse::<u16>() {
            Ok(port) => format!(
                "{text:?} is a port without an address: write 127.0.0.1:{port} for this host alone, or the address at which others reach it"
            ),
            Err(_) => format!("{text:?} is not ADDRESS[:PORT]: ports end at {}", u16::MAX),
        });
    }
    let no_address = || format!("{text:?} has no address");
    if let Ok(mut found) = text.to_socket_addrs() {
        let found = found.next().ok_or_else(no_address)?;
        return Ok(Listen { address: found.ip(), port: Some(found.port()) });
    }
    let bare = text.trim_start_matches('[').trim_end_matches(']');
    let mut found =
        (bare, 0).to_socket_addrs().map_err(|e| format!("{text:?} is not ADDRESS[:PORT]: {e}"))?;
    Ok(Listen { address: found.next().ok_or_else(no_address)?.ip(), port: None })
}

/// `unix:PATH`.
///
/// # Errors
/// Anything else.
pub fn unix_address(text: &str) -> Result<PathBuf, String> {
    match text.strip_prefix("unix:").map(PathBuf::from) {
        Some(path) if path.is_absolute() => Ok(path),
        Some(_) => Err(format!("the path in {text:?} is not absolute")),
        None => Err(format!("{text:?} is not unix:PATH")),
    }
}

/// Where a process answers: `unix:PATH`, or on TCP `HOST:PORT`, as Longhorn's command lines have it.
///
/// # Errors
/// Neither, or no address of this host's.
pub fn control_address(text: &str) -> Result<Address, String> {
    if text.starts_with("unix:") {
        return unix_address(text).map(Address::Unix);
    }
    let wrong = |e: &dyn std::fmt::Display| format!("{text:?} is neither unix:PATH nor ADDRESS:PORT: {e}");
    let mut found = text.strip_prefix("tcp:").unwrap_or(text).to_socket_addrs().map_err(|e| wrong(&e))?;
    found.next().map(Address::Tcp).ok_or_else(|| wrong(&"it has no address"))
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::*;

    #[test]
    fn addresses_with_and_without_a_port() {
        let parsed =
            |text| listen_address(text).unwrap().with_default(nbd_frontend::proto::DEFAULT_PORT).to_string();
        assert_eq!(parsed("127.0.0.1"), "127.0.0.1:10809");
        assert_eq!(parsed("127.0.0.1:7"), "127.0.0.1:7");
        assert_eq!(parsed("::1"), "[::1]:10809");
        assert_eq!(parsed("[::1]:7"), "[::1]:7");
        assert_eq!(parsed("[::1]"), "[::1]:10809");
        assert!(listen_address("no such host").is_err());
        for port in [":65533", "65533"] {
            assert!(listen_address(port).unwrap_err().contains("write 127.0.0.1:65533"), "{port}");
        }
        assert!(listen_address("65536").unwrap_err().contains("65535"), "it is no address either");
        assert!(listen_address("127.0.0.1:99999").is_err());
    }

    #[derive(Debug, clap::Parser)]
    struct Program {
        #[command(subcommand)]
        command: Words,
    }

    #[derive(Debug, clap::Subcommand)]
    enum Words {
        Run {
            #[arg(long, env = "LONGHORN_TEST_ONLY_QUORUM", value_parser = quorum())]
            quorum: Quorum,
        },
    }

    #[test]
    fn a_value_of_the_environment_is_told_by_its_variable() {
        let asked = |words: &[&str], value: &str| {
            let e = Program::try_parse_from(["program", "run", "--quorum", value]).unwrap_err();
            let mut program = Program::command();
            program.build();
            let words: Vec<OsString> = words.iter().map(OsString::from).collect();
            let variable = variable(&e, &program, &|_| Some(value.into()), &words);
            (variable, of_variable(&e, "LONGHORN_TEST_ONLY_QUORUM"))
        };
        let (found, told) = asked(&["program", "run"], "most");
        assert_eq!(found, Some(("LONGHORN_TEST_ONLY_QUORUM".to_owned(), false)));
        assert!(
            told.starts_with("invalid value 'most' for LONGHORN_TEST_ONLY_QUORUM, in the environment"),
            "{told}"
        );
        assert!(told.contains("majority") && !told.contains("--quorum"), "{told}");
        assert_eq!(asked(&["program", "run"], "").0, Some(("LONGHORN_TEST_ONLY_QUORUM".to_owned(), true)));
        for given in [&["program", "run", "--quorum", "most"][..], &["program", "run", "--quorum=most"]] {
            assert_eq!(asked(given, "most").0, None, "{given:?}");
        }
    }

    #[test]
    fn names_of_images_are_plain() {
        for good in ["longhorn:0.1.0", "127.0.0.1:5000/a/b@sha256:0f", "a"] {
            assert_eq!(image_name(good).unwrap(), good);
        }
        for bad in ["", "a b", "-a", "a\nb: c", "{a}", "a, b", "a\"", ":a"] {
            assert!(image_name(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_process_answers_on_a_unix_socket_or_on_an_address() {
        assert_eq!(control_address("unix:/a/b"), Ok(Address::Unix("/a/b".into())));
        for tcp in ["127.0.0.1:9501", "tcp:127.0.0.1:9501"] {
            assert_eq!(control_address(tcp), Ok(Address::Tcp("127.0.0.1:9501".parse().unwrap())));
        }
        let by_name = control_address("localhost:9502").unwrap();
        assert!(
            matches!(by_name, Address::Tcp(address) if address.port() == 9502 && address.ip().is_loopback())
        );
        for bad in ["unix:a", "/a/b", "127.0.0.1", ":9501", "127.0.0.1:99999", ""] {
            assert!(control_address(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn seconds_are_a_number_that_a_clock_can_reach() {
        assert_eq!((seconds("0"), seconds("4294967295")), (Ok(0), Ok(u64::from(u32::MAX))));
        for bad in ["4294967296", "18446744073709551615", "-1", "1.5", "5s", ""] {
            let said = seconds(bad).unwrap_err();
            assert!(said.contains("from 0 to 4294967295"), "{said}");
        }
    }

    #[test]
    fn sockets_are_named_by_absolute_paths() {
        assert_eq!(unix_address("unix:/a/b").unwrap(), PathBuf::from("/a/b"));
        for bad in ["/a/b", "unix:a", "tcp://1.2.3.4:5", "1.2.3.4:5"] {
            assert!(unix_address(bad).is_err(), "{bad}");
        }
    }
}
