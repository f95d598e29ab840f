//! What replicas grant engines: to read in their files (`docs/decisions/0016-reads-on-one-host-are-the-engines-own.md`). All are
//! granted, as if all shared this host.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use datapath::link::{Watch, Witness};
use datapath::queue::Transmit;
use lh_wire::Place;
use replica::serve::core::ConnId;

use tests::register::Stamp;

/// The memory that a replica writes and an engine watches, and what is taken out of it.
#[derive(Debug, Default)]
pub(crate) struct Words {
    over: Cell<bool>,
    counts: RefCell<BTreeMap<usize, u64>>,
    /// The engine does not look at the counters.
    uncounted: bool,
    /// The engine does not look whether it is over.
    endless: bool,
}

impl Words {
    pub(crate) fn new(uncounted: bool, endless: bool) -> Self {
        Self { uncounted, endless, ..Self::default() }
    }

    pub(crate) fn raise(&self, counter: usize) {
        *self.counts.borrow_mut().entry(counter).or_default() += 1;
    }

    pub(crate) fn end(&self) {
        self.over.set(true);
    }

    /// Where a counter stands, for who tells places.
    pub(crate) fn told(&self, counter: usize) -> u64 {
        self.count(counter)
    }
}

impl Watch for Words {
    fn is_over(&self) -> bool {
        self.over.get() && !self.endless
    }

    fn count(&self, counter: usize) -> u64 {
        let counts = self.counts.borrow();
        counts.get(&counter).copied().filter(|_| !self.uncounted).unwrap_or(0)
    }
}

/// A grant as an engine has it.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    /// Over all replicas.
    pub(crate) number: u32,
    pub(crate) words: Rc<Words>,
    /// Numbers of files.
    pub(crate) files: Rc<Vec<u64>>,
    /// The descriptors, which keep the locks of the files: a new process of the replica waits until all copies are gone.
    #[expect(dead_code, reason = "held, never looked at")]
    pub(crate) locks: Rc<()>,
}

/// A read under way in granted files.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) transmit: Transmit,
    pub(crate) conn: ConnId,
    pub(crate) grant: Grant,
    pub(crate) place: Place,
    pub(crate) witness: Witness,
    /// What the file gave; `None`: an error.
    pub(crate) read: Option<Vec<Stamp>>,
}
