//! How data travels between the engine of one node and the replicas of another.

use std::net::IpAddr;
use std::path::PathBuf;

use lh_block::Address;

/// How engines reach the replicas of this node, and relays its engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Over unix sockets: all nodes are this machine.
    #[default]
    ThisMachine,
    /// Over TCP on this address of the node, without encryption; the volume's key is proved all the same.
    Network(IpAddr),
}

impl Reach {
    /// What a command line gets besides where its process listens on a port: the instance manager adds it at the end.
    pub(super) fn port_argument(self, option: &str) -> Option<String> {
        match self {
            Self::ThisMachine => None,
            Self::Network(IpAddr::V4(address)) => Some(format!("--{option},tcp:{address}:")),
            Self::Network(IpAddr::V6(address)) => Some(format!("--{option},tcp:[{address}]:")),
        }
    }

    /// Where that is, for a process that has this port, and this socket otherwise.
    pub(super) fn address(self, port: Option<u16>, socket: PathBuf) -> Address {
        match (self, port) {
            (Self::Network(ip), Some(port)) => Address::Tcp((ip, port).into()),
            // One that was started before its node had an address listens where it did.
            (Self::Network(_), None) | (Self::ThisMachine, _) => Address::Unix(socket),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_makes_the_argument_an_address() {
        assert_eq!(Reach::ThisMachine.port_argument("data-listen"), None);
        for ip in ["10.0.0.7", "fd00::7"] {
            let argument =
                Reach::Network(ip.parse().unwrap()).port_argument("data-listen").unwrap() + "10000";
            let address = argument.strip_prefix("--data-listen,").unwrap().parse().unwrap();
            assert!(
                matches!(address, Address::Tcp(tcp) if tcp.ip().to_string() == ip && tcp.port() == 10_000)
            );
        }
    }
}
