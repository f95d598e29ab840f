//! Where a replica listens for its engine.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

/// Where a replica's process listens for data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A unix socket on this host.
    Unix(PathBuf),
    /// TCP; port 0 listens on any that is free.
    Tcp(SocketAddr),
}

impl Address {
    /// On this host for sure.
    pub const fn is_local(&self) -> bool {
        matches!(self, Self::Unix(_))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl From<PathBuf> for Address {
    fn from(path: PathBuf) -> Self {
        Self::Unix(path)
    }
}

/// As it is displayed: `unix:PATH` or `tcp:ADDRESS:PORT`. Names of hosts are not looked up: one that changes its meaning would
/// lead to another replica.
impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:").map(PathBuf::from) {
            return if path.is_absolute() {
                Ok(Self::Unix(path))
            } else {
                Err(format!("the path in {text:?} is not absolute"))
            };
        }
        let Some(address) = text.strip_prefix("tcp:") else {
            return Err(format!("{text:?} is neither unix:PATH nor tcp:ADDRESS:PORT"));
        };
        let wrong = |_| format!("{address:?} in {text:?} is not an IP address and a port");
        address.parse().map(Self::Tcp).map_err(wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in ["unix:/a/b", "unix:/a=b:c", "tcp:127.0.0.1:10000", "tcp:[::1]:1"] {
            assert_eq!(text.parse::<Address>().unwrap().to_string(), text);
        }
        for bad in ["/a/b", "unix:a", "tcp:1.2.3.4", "tcp:host:1", "1.2.3.4:5", "tcp://1.2.3.4:5", ""] {
            assert!(bad.parse::<Address>().is_err(), "{bad}");
        }
    }
}
