//! The words that `status -o json` prints of a volume: closed lists, which scripts compare with.

use std::fmt;

use control::proto::ptypes::ReplicaMode;
use serde::{Serialize, Serializer};

/// An enumeration of words. The first one is the default.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident {
        $(#[$first_doc:meta])* $first:ident = $first_word:literal,
        $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $name {
            $(#[$first_doc])* #[default] $first,
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// As it is printed.
            pub const fn as_str(self) -> &'static str {
                match self {
                    Self::$first => $first_word,
                    $(Self::$variant => $word,)*
                }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.as_str())
            }
        }
    };
}

words! {
    /// Whether a volume is there to be used.
    Attachment {
        /// Nothing of it runs, or is to.
        Detached = "detached",
        /// It is on its way to its clients.
        Attaching = "attaching",
        /// It is shown.
        Attached = "attached",
        /// It is being stopped.
        Detaching = "detaching",
    }
}

words! {
    /// How many of its replicas an attached volume can do without.
    Robustness {
        /// It is not attached, or its engine does not answer.
        Unknown = "unknown",
        /// All are in sync.
        Healthy = "healthy",
        /// Some are.
        Degraded = "degraded",
        /// None is.
        Faulted = "faulted",
    }
}

words! {
    /// What a replica does for its volume, in Longhorn's words.
    Mode {
        /// It is left out.
        Err = "ERR",
        /// It takes writes, and is being filled.
        Wo = "WO",
        /// It is in sync.
        Rw = "RW",
    }
}

impl From<ReplicaMode> for Mode {
    fn from(mode: ReplicaMode) -> Self {
        match mode {
            ReplicaMode::Wo => Self::Wo,
            ReplicaMode::Rw => Self::Rw,
            ReplicaMode::Err => Self::Err,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_printed_as_the_interface_has_it() {
        use {Attachment as A, Robustness as R};
        let printed = serde_json::json!([
            [A::Attached, A::Detached, A::Attaching, A::Detaching],
            [R::Healthy, R::Degraded, R::Faulted, R::Unknown],
            [Mode::Rw, Mode::Wo, Mode::Err],
        ]);
        assert_eq!(
            printed,
            serde_json::json!([
                ["attached", "detached", "attaching", "detaching"],
                ["healthy", "degraded", "faulted", "unknown"],
                ["RW", "WO", "ERR"],
            ])
        );
        for mode in [ReplicaMode::Wo, ReplicaMode::Rw, ReplicaMode::Err] {
            assert_eq!(Mode::from(mode).as_str(), mode.as_str_name());
        }
    }
}
