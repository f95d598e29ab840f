//! How data travels between the engine of one node and the replicas of another.

use std::net::IpAddr;

/// How engines reach the replicas of this node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reach {
    /// Over unix sockets: all nodes are this machine.
    #[default]
    ThisMachine,
    /// Over TCP on this address of the node, without encryption; the volume's key is proved all the same.
    Network(IpAddr),
}

impl Reach {
    /// What a replica's command line gets besides: the instance manager adds the port at the end of it.
    pub(super) fn port_argument(self) -> Option<String> {
        match self {
            Self::ThisMachine => None,
            Self::Network(IpAddr::V4(address)) => Some(format!("--data-listen,tcp:{address}:")),
            Self::Network(IpAddr::V6(address)) => Some(format!("--data-listen,tcp:[{address}]:")),
        }
    }
}

#[cfg(test)]
mod tests {
    use lh_block::Address;

    use super::*;

    #[test]
    fn a_port_makes_the_argument_an_address() {
        assert_eq!(Reach::ThisMachine.port_argument(), None);
        for ip in ["10.0.0.7", "fd00::7"] {
            let argument = Reach::Network(ip.parse().unwrap()).port_argument().unwrap() + "10000";
            let address = argument.strip_prefix("--data-listen,").unwrap().parse().unwrap();
            assert!(
                matches!(address, Address::Tcp(tcp) if tcp.ip().to_string() == ip && tcp.port() == 10_000)
            );
        }
    }
}
