//! What the authority is known to have: the epoch that counts, as long as nobody has stored another one since.
//!
//! **No start is made from an answer that is older than the last fence.** The engine before loses its replicas one after the other, as
//! they are fenced for this one, and stores an epoch without those that it has lost: what was answered before the last fence may be
//! older than that epoch, and whoever it left out would be started with. So every fence makes the answer outdated
//! ([`AuthorityView::fenced_somebody`]), also one that is still on its way, and a start waits until [`AuthorityView::is_current`]
//! (`docs/invariants.md`, 12).
//!
//! Further:
//!
//! - One request is on its way at a time, of each kind: what comes without having been asked for is not believed, but for the first
//!   answer.
//! - The outcome of a compare-and-swap is always waited for: until it is known the epoch may count or not. It is sent again until then,
//!   and its own epoch found there is its success, heard late.
//! - With another quorum than `any` the authority is neither asked nor told: nothing is ever stored, and nothing waited for.

use lh_block::{Epoch, EpochOrder, Generation};

use super::event::{Quorum, Stored};

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct AuthorityView {
    /// The quorum is `any`.
    decides: bool,
    /// What it has; `None` until it has answered.
    authority: Option<Option<Epoch>>,
    /// A replica was fenced since it was asked: the engine before may have stored an epoch in between.
    outdated: bool,
    /// It is being asked again.
    asking: bool,
    store: Option<Store>,
}

/// A compare-and-swap on its way.
#[derive(Debug)]
struct Store {
    epoch: Epoch,
    /// `None`: the request is with the authority.
    retry_at: Option<u64>,
    /// Why it was not stored the last time.
    refused: Option<String>,
}

/// What an answer to a compare-and-swap means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Nobody had asked.
    Unasked,
    /// It may be stored or not, for this reason, and is tried again.
    Unknown(String),
    /// It is stored.
    Counts,
    /// An engine before had this one on its way while it was fenced off: it counts, and this engine's will not.
    Overtaken(Epoch),
    /// Another engine has taken over, or the authority has forgotten; for people.
    Stale(String),
}

impl AuthorityView {
    pub(super) const fn new(quorum: Quorum) -> Self {
        let decides = matches!(quorum, Quorum::Any);
        Self { decides, authority: None, outdated: false, asking: false, store: None }
    }

    /// Its answer has come.
    pub(super) fn loaded(&mut self, epoch: Option<Epoch>) {
        if self.authority.is_none() || self.asking {
            self.authority = Some(epoch);
            self.asking = false;
        }
    }

    /// What it has, as it said last; `None`: it has not answered.
    pub(super) const fn known(&self) -> Option<&Option<Epoch>> {
        self.authority.as_ref()
    }

    /// The epoch that it has, as it said last.
    pub(super) fn epoch(&self) -> Option<&Epoch> {
        self.authority.as_ref()?.as_ref()
    }

    /// A replica was fenced for this engine.
    pub(super) const fn fenced_somebody(&mut self) {
        self.outdated = true;
    }

    /// Whether it is to be asked now; then it is being asked.
    pub(super) const fn ask_again(&mut self) -> bool {
        let due = self.decides && self.outdated && !self.asking;
        if due {
            (self.outdated, self.asking) = (false, true);
        }
        due
    }

    /// It has answered what it was asked after the last fence, or decides nothing.
    pub(super) const fn is_current(&self) -> bool {
        !self.decides || (!self.outdated && !self.asking)
    }

    /// An answer of it is waited for.
    pub(super) const fn is_awaited(&self) -> bool {
        self.decides && (self.authority.is_none() || self.asking)
    }

    /// An older engine's epoch that counts, which was found when this one's was to be stored.
    pub(super) fn found(&mut self, epoch: Epoch) {
        self.authority = Some(Some(epoch));
    }

    /// The epoch is to replace what the authority has, from `now` on.
    pub(super) fn begin_storing(&mut self, epoch: &Epoch, now: u64) {
        if self.decides {
            self.store = Some(Store { epoch: epoch.clone(), retry_at: Some(now), refused: None });
        }
    }

    pub(super) const fn is_storing(&self) -> bool {
        self.store.is_some()
    }

    /// The compare-and-swap that is to be sent now: what is expected there, and the epoch that replaces it. It is with the authority
    /// then.
    pub(super) fn due(&mut self, now: u64) -> Option<(Option<EpochOrder>, Epoch)> {
        let expected = self.order_to_replace();
        let store = self.store.as_mut().filter(|s| s.retry_at.is_some_and(|at| at <= now))?;
        store.retry_at = None;
        Some((expected, store.epoch.clone()))
    }

    fn order_to_replace(&self) -> Option<EpochOrder> {
        self.epoch().map(Epoch::order)
    }

    /// Its answer to that, for the engine of the generation `own`. `serves`: requests may have been admitted. If it is not known whether
    /// the epoch is stored, it is tried again at `retry_at`.
    pub(super) fn answered(
        &mut self,
        stored: Stored,
        own: Generation,
        serves: bool,
        retry_at: u64,
    ) -> Verdict {
        let Some(mut store) = self.store.take_if(|s| s.retry_at.is_none()) else { return Verdict::Unasked };
        match stored {
            Stored::Unavailable { reason } => {
                store.retry_at = Some(retry_at);
                store.refused = Some(reason.clone());
                self.store = Some(store);
                Verdict::Unknown(reason)
            }
            // An answer that was lost: it had been stored.
            Stored::Conflict { current: Some(current) } if current == store.epoch => self.stored(store),
            Stored::Stored => self.stored(store),
            // Once requests were let in, its own epochs are there. An older one again means that the authority has forgotten:
            // what its members hold by now, nobody can say.
            Stored::Conflict { current: Some(current) } if current.generation < own && !serves => {
                Verdict::Overtaken(current)
            }
            Stored::Conflict { current } => {
                self.store = Some(store);
                Verdict::Stale(current.map_or_else(
                    || "the authority has lost its epoch".to_owned(),
                    |e| format!("the authority has epoch {}.{}", e.generation, e.counter),
                ))
            }
        }
    }

    fn stored(&mut self, store: Store) -> Verdict {
        self.authority = Some(Some(store.epoch));
        Verdict::Counts
    }

    pub(super) fn retry_at(&self) -> Option<u64> {
        self.store.as_ref()?.retry_at
    }

    /// What an epoch waits for that was refused, for people.
    pub(super) fn waiting_for(&self) -> Option<String> {
        let reason = self.store.as_ref()?.refused.as_ref()?;
        Some(format!("who holds the replicas' bytes cannot be noted: {reason}"))
    }
}

#[cfg(test)]
mod tests {
    use lh_block::Instance;

    use super::*;

    fn own() -> Generation {
        Generation::from(7)
    }

    fn epoch(generation: u64, counter: u64) -> Epoch {
        let (generation, id) = (Generation::from(generation), Instance(u128::from(counter)));
        Epoch { generation, counter, members: vec!["r1".into()], id, after: None, round: None }
    }

    #[test]
    fn no_answer_is_current_that_is_older_than_the_last_fence() {
        let mut view = AuthorityView::new(Quorum::Any);
        view.fenced_somebody();
        view.loaded(Some(epoch(6, 1)));
        assert!(!view.is_current(), "it may have been asked before");
        assert!(view.ask_again() && !view.ask_again(), "one question at a time");
        view.fenced_somebody();
        view.loaded(Some(epoch(6, 2)));
        assert!(!view.is_current(), "the fence came while the answer was on its way");
        assert!(view.ask_again());
        assert!(view.is_awaited() && !view.is_current());
        view.loaded(Some(epoch(6, 3)));
        assert!(view.is_current());
        view.loaded(Some(epoch(6, 1)));
        assert_eq!(view.epoch(), Some(&epoch(6, 3)), "nobody had asked");
    }

    #[test]
    fn an_authority_that_decides_nothing_is_neither_asked_nor_told() {
        let mut view = AuthorityView::new(Quorum::Majority);
        view.fenced_somebody();
        view.begin_storing(&epoch(7, 1), 0);
        assert_eq!((view.is_current(), view.ask_again(), view.is_awaited()), (true, false, false));
        assert_eq!((view.is_storing(), view.due(10)), (false, None));
    }

    /// One that is asked to store an epoch in the place of 6.3.
    fn storing() -> AuthorityView {
        let mut view = AuthorityView::new(Quorum::Any);
        view.loaded(Some(epoch(6, 3)));
        view.begin_storing(&epoch(7, 1), 5);
        assert_eq!(view.due(4), None);
        assert_eq!(view.due(5), Some((Some(epoch(6, 3).order()), epoch(7, 1))));
        assert_eq!(view.due(5), None, "it is with the authority");
        view
    }

    #[test]
    fn what_may_be_stored_is_stored_again_until_it_is_known() {
        let mut view = storing();
        let away = Stored::Unavailable { reason: "away".into() };
        assert_eq!(view.answered(away.clone(), own(), true, 9), Verdict::Unknown("away".into()));
        assert_eq!((view.is_storing(), view.retry_at()), (true, Some(9)));
        assert_eq!(view.answered(away, own(), true, 9), Verdict::Unasked);
        assert_eq!(view.due(9), Some((Some(epoch(6, 3).order()), epoch(7, 1))));
        let late = Stored::Conflict { current: Some(epoch(7, 1)) };
        assert_eq!(view.answered(late, own(), true, 9), Verdict::Counts, "it had been stored");
        assert_eq!((view.is_storing(), view.epoch()), (false, Some(&epoch(7, 1))));
    }

    #[test]
    fn what_stands_there_instead_is_started_from_or_ends_the_engine() {
        let conflict = |current| Stored::Conflict { current };
        let older = || conflict(Some(epoch(6, 4)));
        let mut view = storing();
        assert_eq!(view.answered(older(), own(), false, 9), Verdict::Overtaken(epoch(6, 4)));
        assert!(!view.is_storing());
        for (stored, serves) in
            [(older(), true), (conflict(Some(epoch(8, 1))), false), (conflict(None), false)]
        {
            let verdict = storing().answered(stored, own(), serves, 9);
            assert!(matches!(verdict, Verdict::Stale(_)), "{verdict:?}");
        }
    }
}
