//! Errors as people read them.

use crate::next_step;

/// The error as one line; a gRPC status is told by its message alone.
pub(crate) fn sentence(e: &anyhow::Error) -> String {
    let parts = e.chain().map(|cause| match cause.downcast_ref::<tonic::Status>() {
        Some(status) if status.message().is_empty() => status.code().to_string(),
        Some(status) => status.message().to_owned(),
        None => cause.to_string(),
    });
    let mut text: Vec<String> = Vec::new();
    for part in parts {
        // Errors whose text contains their source's are said once.
        if !text.last().is_some_and(|last| last.contains(&part)) {
            text.push(part);
        }
    }
    next_step::complete(&text.join(": ").replace('\n', " ")).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_line_and_says_nothing_twice() {
        let e = anyhow::Error::from(tonic::Status::permission_denied("not\nrun here")).context("start it");
        assert_eq!(sentence(&e), "start it: not run here");
        let inner = anyhow::anyhow!("no such file");
        assert_eq!(sentence(&inner.context("open /x: no such file")), "open /x: no such file");
    }
}
