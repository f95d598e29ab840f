//! What an engine waits for, told to whoever waits for its answer: one that is asked while its replicas are away waits for them, and
//! says nothing by itself.

use std::convert::Infallible;
use std::time::Duration;

use control::proto::ptypes::Volume;
use control::proto::volume::Wait;

/// Looks what an engine waits for, at once and then after each `pause`, and says so whenever that is another thing than before. `look`
/// gives `None` where the engine does not say. Never ends by itself.
pub(crate) async fn tell_waits(
    pause: Duration,
    mut look: impl AsyncFnMut() -> Option<Volume>,
    mut say: impl FnMut(&str),
) -> Infallible {
    let mut told = String::new();
    loop {
        if let Some(volume) = look().await {
            // No command waits for a volume that is only hidden.
            let is_worth_telling = !matches!(volume.waits(), Wait::Untold | Wait::Shown);
            if is_worth_telling && volume.waiting_for != told {
                say(&format!("waiting: {}", volume.waiting_for));
            }
            told = volume.waiting_for;
        }
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_waited_for_is_said_once_and_again_after_something_else() {
        let waits = |wait: Wait, what: &str| {
            Some(Volume { wait: wait.into(), waiting_for: what.to_owned(), ..Volume::default() })
        };
        let (hidden, nothing) = (waits(Wait::Shown, "it can be shown"), waits(Wait::Untold, ""));
        let [one, other] = ["r-1", "r-2"].map(|name| waits(Wait::Other, name));
        let seen = [one.clone(), one.clone(), None, one.clone(), hidden, nothing, other, one];
        let mut seen = seen.into_iter();
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
