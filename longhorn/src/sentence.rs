//! Errors as people read them.

use std::error::Error;
use std::io;

use tonic::Status;

use crate::next_step;

/// Whoever was asked was gone before, and was not asked.
const NOT_THERE: &str = "nobody answers there just now, as while it is started again: ask once more";

/// Whoever was asked was gone before the answer came.
const ENDED: &str = "who was asked ended before it answered: look, and ask once more";

/// The error as one line; a gRPC status is told by its message alone. Of what was asked of a process that ended meanwhile it is not
/// said that it was not done.
pub(crate) fn sentence(e: &anyhow::Error) -> String {
    let mut text: Vec<String> = Vec::new();
    for cause in e.chain() {
        let part = match cause.downcast_ref::<Status>() {
            Some(status) if broke(status) => {
                if let Some(claim) = text.pop() {
                    let asked = claim.strip_prefix("no ").map(|what| format!("a {what}"));
                    text.push(format!("it is not known whether {}", asked.unwrap_or(claim)));
                }
                text.push(ENDED.to_owned());
                break;
            }
            Some(status) if is_refused_connection(status) => {
                text.push(NOT_THERE.to_owned());
                break;
            }
            Some(status) if status.message().is_empty() => status.code().to_string(),
            Some(status) => status.message().to_owned(),
            None => cause.to_string(),
        };
        // Errors whose text contains their source's are said once.
        if !text.last().is_some_and(|last| last.contains(&part)) {
            text.push(part);
        }
    }
    next_step::complete(&text.join(": ").replace('\n', " ")).into_owned()
}

/// The connection was there, and broke.
fn broke(status: &Status) -> bool {
    // A status that came over the wire has no source.
    status.source().is_some_and(<dyn Error>::is::<tonic::transport::Error>) && !is_refused_connection(status)
}

/// There was no connection.
fn is_refused_connection(status: &Status) -> bool {
    let mut source = status.source();
    while let Some(cause) = source {
        let kind = cause.downcast_ref::<io::Error>().map(io::Error::kind);
        if matches!(kind, Some(io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)) {
            return true;
        }
        source = cause.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    use control::proto::volume::SnapshotName;
    use control::proto::volume::volume_operations_client::VolumeOperationsClient;

    use super::*;

    /// Lets in one who looks whether anybody is there, and one who asks, and is gone when the question is there: the first HEADERS
    /// frame (RFC 9113, 6.2).
    fn end_when_asked(listener: &UnixListener) {
        drop(listener.accept().unwrap());
        let (mut asker, _) = listener.accept().unwrap();
        asker.read_exact(&mut [0; b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len()]).unwrap();
        let mut frame = [0; 9];
        while frame[3] != 1 {
            asker.read_exact(&mut frame).unwrap();
            let length = u32::from_be_bytes([0, frame[0], frame[1], frame[2]]);
            asker.read_exact(&mut vec![0; length as usize]).unwrap();
        }
    }

    #[tokio::test]
    async fn of_what_was_asked_of_who_ended_nobody_knows_whether_it_was_done() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("engine");
        let listener = UnixListener::bind(&path).unwrap();
        let mut asked_once = Some(std::thread::spawn(move || end_when_asked(&listener)));
        let mut engine = VolumeOperationsClient::new(control::transport::connect(&path).await.unwrap());
        let mut said = Vec::new();
        for _ in 0..2 {
            let asked = engine.snapshot_remove(SnapshotName { name: "one".into() }).await;
            let refused = asked.unwrap_err();
            // Else who asks once more may be let in by one that is about to end.
            if let Some(ends) = asked_once.take() {
                ends.join().unwrap();
            }
            let none = anyhow::Error::from(refused.clone()).context("no snapshot of volume demo was taken");
            said.extend([
                sentence(&anyhow::Error::from(refused).context("snapshot one stays")),
                sentence(&none),
            ]);
        }
        said.truncate(3);
        assert_eq!(
            said,
            [
                "it is not known whether snapshot one stays: who was asked ended before it answered: look, and ask once more",
                "it is not known whether a snapshot of volume demo was taken: who was asked ended before it answered: look, and ask once more",
                "snapshot one stays: nobody answers there just now, as while it is started again: ask once more",
            ]
        );
    }

    #[test]
    fn an_error_is_one_line_and_says_nothing_twice() {
        let e = anyhow::Error::from(tonic::Status::permission_denied("not\nrun here")).context("start it");
        assert_eq!(sentence(&e), "start it: not run here");
        let inner = anyhow::anyhow!("no such file");
        assert_eq!(sentence(&inner.context("open /x: no such file")), "open /x: no such file");
    }
}
