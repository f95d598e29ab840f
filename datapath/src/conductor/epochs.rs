//! This engine's epochs: which one counts, which are recorded, and which is made next.
//!
//! - No two epochs that may count have the same order: an engine has a generation of its own and counts the epochs that it makes from 1,
//!   whatever becomes of each, also where the start begins again.
//! - Number 0 never counts. With the quorum `majority` the first epoch of a volume is announced by one of that number: where nothing but
//!   that is found, nothing was ever answered. Otherwise replicas without an epoch were emptied since, and tell nothing (`choose`).
//! - An epoch that was given up may lie on some replicas. Until the next one counts, which is younger and replaces it, the one that
//!   counts does not settle who the members are (`docs/invariants.md`, 12).

use lh_block::{Epoch, EpochOrder, Generation, Instance};

use super::{Config, Quorum};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Epochs {
    generation: Generation,
    instance: Instance,
    /// The quorum is `majority`.
    announces: bool,
    /// The epoch that counts.
    epoch: Option<Epoch>,
    /// What each member has recorded at least: that epoch, or one before it at the start.
    recorded: Option<EpochOrder>,
    /// The epoch that counted at the start, if there was one.
    started_from: Option<EpochOrder>,
    /// Counts this engine's epochs.
    counter: u64,
    /// The volume's first epoch is about to be made, and a majority knows that.
    announced: bool,
    /// Some replica may hold an epoch that does not count: the next one replaces it.
    loose: bool,
}

impl Epochs {
    pub(super) const fn new(config: &Config) -> Self {
        Self {
            generation: config.generation,
            instance: config.instance,
            announces: matches!(config.quorum, Quorum::Majority),
            epoch: None,
            recorded: None,
            started_from: None,
            counter: 0,
            announced: false,
            loose: false,
        }
    }

    /// A start goes out from this epoch, of which each member that was found has recorded that one at least.
    pub(super) fn start_from(&mut self, base: Option<Epoch>, recorded: Option<EpochOrder>) {
        self.started_from = base.as_ref().map(Epoch::order);
        self.epoch = base;
        self.recorded = recorded;
    }

    /// The next epoch, with these members: names, sorted.
    pub(super) fn next(&mut self, members: Vec<String>) -> Epoch {
        if !self.is_to_announce() {
            self.counter += 1;
        }
        Epoch {
            generation: self.generation,
            counter: self.counter,
            members,
            id: Instance(self.instance.0.wrapping_add(u128::from(self.counter))),
            after: self.recorded,
            round: None,
        }
    }

    /// Not once a number was used: it may lie somewhere, and is not used twice.
    fn is_to_announce(&self) -> bool {
        self.announces && self.epoch.is_none() && !self.announced && self.counter == 0
    }

    /// All its members have recorded the epoch, and the authority has it: it counts, unless it was only to announce the first.
    pub(super) fn counts(&mut self, epoch: &Epoch) {
        if epoch.counter == 0 {
            (self.announced, self.loose) = (true, true);
        } else {
            self.epoch = Some(epoch.clone());
            self.loose = false;
        }
        self.recorded = Some(epoch.order());
    }

    /// Some replica may have recorded an epoch that does not count, or names a replica that is gone: another one is to be made.
    pub(super) const fn loosen(&mut self) {
        self.loose = true;
    }

    /// The epoch that counts.
    pub(super) const fn current(&self) -> Option<&Epoch> {
        self.epoch.as_ref()
    }

    pub(super) fn order(&self) -> Option<EpochOrder> {
        self.epoch.as_ref().map(Epoch::order)
    }

    /// The epoch that counted at the start, if there was one.
    pub(super) const fn started_from(&self) -> Option<EpochOrder> {
        self.started_from
    }

    /// These, by sorted names, are the members of the epoch that counts, and nobody holds a younger one.
    pub(super) fn is(&self, members: &[String]) -> bool {
        !self.loose && self.epoch.as_ref().is_some_and(|e| e.members == members)
    }

    /// The replica of that name is a member of the epoch that counts.
    pub(super) fn has(&self, name: &str) -> bool {
        self.epoch.as_ref().is_some_and(|e| e.has(name))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use super::*;
    use crate::conductor::{Limits, Sabotage};
    use crate::shared::Shared;

    fn epochs(quorum: Quorum) -> Epochs {
        Epochs::new(&Config {
            volume: "demo".into(),
            generation: Generation::from(7),
            instance: Instance(100),
            quorum,
            replicas: Vec::new(),
            queues: 1,
            size: 4096,
            shared: Arc::new(Shared::new(4096, 4096)),
            known_dead: false,
            limits: Limits::default(),
            sabotage: Sabotage::default(),
        })
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn before() -> Epoch {
        let generation = Generation::from(6);
        Epoch {
            generation,
            counter: 9,
            members: names(&["a", "b"]),
            id: Instance(9),
            after: None,
            round: None,
        }
    }

    #[test]
    fn no_two_epochs_have_one_order() {
        for quorum in [Quorum::Any, Quorum::Majority, Quorum::Unsafe] {
            let mut epochs = epochs(quorum);
            let (mut orders, mut ids) = (BTreeSet::new(), BTreeSet::new());
            for n in 0..40 {
                if n % 10 == 0 {
                    // The start begins again, and is from the same one.
                    epochs.start_from(Some(before()), Some(before().order()));
                }
                if n == 20 {
                    // Nobody knows of any epoch. What was made before this may come back.
                    epochs.start_from(None, None);
                }
                let epoch = epochs.next(names(&["a"]));
                assert!(epoch.order() > before().order());
                assert!(orders.insert(epoch.order()) && ids.insert(epoch.id.0), "{quorum:?}: {epoch:?}");
                match n % 3 {
                    0 => epochs.counts(&epoch),
                    1 => epochs.loosen(),
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn number_0_never_counts() {
        let mut epochs = epochs(Quorum::Majority);
        let first = epochs.next(names(&["a", "b"]));
        assert_eq!(epochs.next(names(&["a"])).counter, 0, "nobody knows of the first one");
        epochs.counts(&first);
        assert_eq!((first.counter, epochs.current(), epochs.order()), (0, None, None));
        assert!(!epochs.has("a") && !epochs.is(&first.members));
        let second = epochs.next(names(&["a", "b"]));
        assert_eq!((second.counter, second.after), (1, Some(first.order())));
        epochs.counts(&second);
        assert!(epochs.has("a") && epochs.is(&second.members));
        assert_eq!(epochs.next(names(&["a"])).counter, 2);
    }

    #[test]
    fn with_another_quorum_or_an_epoch_nothing_is_announced() {
        assert_eq!(epochs(Quorum::Any).next(names(&["a"])).counter, 1);
        let mut later = epochs(Quorum::Majority);
        later.start_from(Some(before()), None);
        assert_eq!((later.next(names(&["a"])).counter, later.started_from()), (1, Some(before().order())));
    }

    #[test]
    fn an_epoch_that_was_given_up_unsettles_until_the_next_one_counts() {
        let mut epochs = epochs(Quorum::Any);
        let first = epochs.next(names(&["a", "b"]));
        epochs.counts(&first);
        assert!(epochs.is(&first.members) && !epochs.is(&names(&["a"])));
        epochs.loosen();
        assert!(!epochs.is(&first.members) && epochs.has("b"));
        let second = epochs.next(first.members.clone());
        epochs.counts(&second);
        assert!(epochs.is(&first.members));
    }
}
