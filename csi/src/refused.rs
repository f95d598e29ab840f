//! Why a request is not carried out, as an orchestrator tells reasons apart.

use lh_cluster::admission::TOO_MANY_SNAPSHOTS;
use thiserror::Error;
use tonic::Status;

/// Why a request is not carried out. Each kind asks something else of the orchestrator.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refused {
    /// The request itself is wrong: asking again is useless.
    #[error("{0}")]
    Argument(String),
    /// What it is about does not exist.
    #[error("{0}")]
    Missing(String),
    /// It exists already, and is not what was asked for.
    #[error("{0}")]
    Different(String),
    /// The size cannot be had.
    #[error("{0}")]
    Range(String),
    /// Something else has to be done first.
    #[error("{0}")]
    Precondition(String),
    /// No room.
    #[error("{0}")]
    Exhausted(String),
    /// It is not done yet, or another request is at it: to be asked again.
    #[error("{0}")]
    NotYet(String),
    /// The API server, or whoever else is needed, does not answer as it should: to be asked again.
    #[error("{0}")]
    Unavailable(String),
    /// A command or a system call of this node failed.
    #[error("{0}")]
    Failed(String),
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        let text = refused.to_string();
        match refused {
            Refused::Argument(_) => Self::invalid_argument(text),
            Refused::Missing(_) => Self::not_found(text),
            Refused::Different(_) => Self::already_exists(text),
            Refused::Range(_) => Self::out_of_range(text),
            Refused::Precondition(_) => Self::failed_precondition(text),
            Refused::Exhausted(_) => Self::resource_exhausted(text),
            Refused::NotYet(_) => Self::aborted(text),
            Refused::Unavailable(_) => Self::unavailable(text),
            Refused::Failed(_) => Self::internal(text),
        }
    }
}

impl From<kube::Error> for Refused {
    fn from(e: kube::Error) -> Self {
        match &e {
            kube::Error::Api(status) if status.reason == TOO_MANY_SNAPSHOTS => {
                Self::Exhausted(status.message.clone())
            }
            // The definitions' own rules: the text of the API server says which.
            kube::Error::Api(status) if status.code == 422 || status.code == 400 => {
                Self::Argument(status.message.clone())
            }
            kube::Error::Api(status) if status.code == 409 => {
                Self::NotYet("what was read has changed since: ask again".to_owned())
            }
            kube::Error::Api(status) if status.code == 403 => Self::Failed(format!(
                "the API server does not allow it: {} (deploy/rbac.yaml has the rights that are needed)",
                status.message
            )),
            _ => Self::Unavailable(format!("the API server: {e}")),
        }
    }
}

/// A field that must be set.
pub(crate) fn required<'a>(what: &str, value: &'a str) -> Result<&'a str, Refused> {
    if value.is_empty() { Err(Refused::Argument(format!("{what} is missing"))) } else { Ok(value) }
}
