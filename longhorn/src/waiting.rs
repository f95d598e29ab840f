//! What an engine waits for, told to whoever waits for its answer: one that is asked while its replicas are away waits for them, and
//! says nothing by itself.

use std::convert::Infallible;
use std::time::Duration;

use control::engine::EngineStatus;

/// Looks what an engine waits for, at once and then after each `pause`, and says so whenever that is another thing than before. `look`
/// gives `None` where the engine does not say. Never ends by itself.
pub(crate) async fn tell_waits(
    pause: Duration,
    mut look: impl AsyncFnMut() -> Option<String>,
    mut say: impl FnMut(&str),
) -> Infallible {
    let mut told = String::new();
    loop {
        if let Some(waits) = look().await {
            // No command waits for a volume that is only hidden.
            if !waits.is_empty() && waits != told && !waits.starts_with(EngineStatus::HIDDEN) {
                say(&format!("waiting: {waits}"));
            }
            told = waits;
        }
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_waited_for_is_said_once_and_again_after_something_else() {
        let hidden = format!("{}: ...", EngineStatus::HIDDEN);
        let seen =
            [Some("r-1"), Some("r-1"), None, Some("r-1"), Some(&hidden), Some(""), Some("r-2"), Some("r-1")];
        let mut seen = seen.into_iter().map(|waits| waits.map(str::to_owned));
        let (mut said, (over, is_over)) = (Vec::new(), tokio::sync::oneshot::channel::<()>());
        let mut over = Some(over);
        let look = async || match seen.next() {
            Some(waits) => waits,
            None => {
                drop(over.take());
                None
            }
        };
        tokio::select! {
            never = tell_waits(Duration::ZERO, look, |what| said.push(what.to_owned())) => match never {},
            _ = is_over => {}
        }
        assert_eq!(said, ["waiting: r-1", "waiting: r-2", "waiting: r-1"]);
    }
}
