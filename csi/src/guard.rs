//! One request at a time for one volume: an orchestrator may ask again before it has an answer, and two that mount or
//! make the same thing at once would disturb each other. The second is told to ask again.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use crate::Refused;

/// What is being worked on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Guard {
    busy: Arc<Mutex<BTreeSet<String>>>,
}

/// Somebody works on it until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    guard: Guard,
    name: String,
}

impl Guard {
    /// Takes a name.
    ///
    /// # Errors
    /// [`Refused::NotYet`]: somebody has it.
    pub(crate) fn take(&self, name: &str) -> Result<Held, Refused> {
        let mut busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        if !busy.insert(name.to_owned()) {
            return Err(Refused::NotYet(format!("another request for {name} is not done yet: ask again")));
        }
        Ok(Held { guard: self.clone(), name: name.to_owned() })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.guard.busy.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_held_by_one_until_it_is_dropped() {
        let guard = Guard::default();
        let held = guard.take("v").unwrap();
        assert!(matches!(guard.take("v"), Err(Refused::NotYet(_))));
        let _other = guard.take("w").unwrap();
        drop(held);
        guard.take("v").unwrap();
    }
}
