//! What a scrub has found, and what it tells.

use lh_block::{BLOCK, Extent};

/// Findings that a scrub lists. A replica with more of them is to be replaced whole.
const FINDINGS_MAX: usize = 4096;

/// Notes that a scrub keeps: replicas that come and go would otherwise fill memory with them.
const NOTES_MAX: usize = 1024;

/// What is wrong with some neighbouring blocks of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// They do not fit their checksums on record, or the disk does not give them.
    Rotten,
    /// They are not what other replicas have.
    Differs,
}

/// What was done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mend {
    /// Nothing: nobody asked for a repair.
    Reported,
    /// Copied from a replica whose blocks are sound, and compared with it afterwards.
    Repaired,
    /// Nothing: every replica's copy is rotten.
    NoSource,
    /// Nothing: replicas differ, and neither checksums nor a majority tell which is right.
    Unsure,
    /// Nothing: replicas differ, though each fits its own checksums.
    Conflict,
    /// It was tried, and the replica still holds something else.
    Failed,
}

/// Some neighbouring blocks of one replica.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// Whose.
    pub replica: String,
    /// Name of the layer's snapshot; empty: the head.
    pub layer: String,
    /// Where, in the volume and in the layer's file.
    pub range: Extent,
    /// What is wrong.
    pub flaw: Flaw,
    /// What was done.
    pub mend: Mend,
}

/// How far a scrub is, and what it has found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubStatus {
    /// It has not ended.
    pub running: bool,
    /// What is found is repaired.
    pub repair: bool,
    /// What it looks at, or what it waits for; for people.
    pub doing: String,
    /// Bytes looked at.
    pub done: u64,
    /// Bytes to be looked at, as far as is known.
    pub total: u64,
    /// What it has found, in the order in which it was found: the first 4096.
    pub findings: Vec<Finding>,
    /// Blocks found wrong in all, each replica's counted.
    pub bad_blocks: u64,
    /// Blocks of these that are sound again.
    pub repaired_blocks: u64,
    /// What was not compared or not hashed, and why: the first 1024.
    pub notes: Vec<String>,
    /// Why it ended before it was through.
    pub error: Option<String>,
}

impl ScrubStatus {
    pub(super) fn add(&mut self, finding: Finding) {
        let blocks = finding.range.len / BLOCK;
        self.bad_blocks += blocks;
        self.repaired_blocks += if finding.mend == Mend::Repaired { blocks } else { 0 };
        let joins = |f: &&mut Finding| {
            (&f.replica, &f.layer, f.flaw, f.mend)
                == (&finding.replica, &finding.layer, finding.flaw, finding.mend)
                && f.range.end() == finding.range.offset
        };
        if let Some(before) = self.findings.iter_mut().rev().take(8).find(joins) {
            before.range.len += finding.range.len;
        } else if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }

    /// Keeps a note, if there is room for it.
    pub(super) fn note(&mut self, text: String) {
        if self.notes.len() < NOTES_MAX {
            self.notes.push(text);
        }
    }

    /// This layer holds blocks that are still wrong on some replica. One replica's rot may be all that is left of what
    /// another, filled from it, holds without a word.
    pub(super) fn is_bad(&self, layer: &str) -> bool {
        // What is not listed may be anywhere.
        self.findings.len() >= FINDINGS_MAX
            || self.findings.iter().any(|f| f.layer == layer && !matches!(f.mend, Mend::Repaired))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_and_notes_are_bounded_and_every_bad_block_is_counted() {
        let mut status = ScrubStatus::default();
        for n in 0..2 * FINDINGS_MAX as u64 {
            status.note(format!("note {n}"));
            status.add(Finding {
                replica: "r".into(),
                layer: "s".into(),
                // Every other block, so that none joins the one before.
                range: Extent::new(2 * n * BLOCK, BLOCK),
                flaw: Flaw::Rotten,
                mend: Mend::Repaired,
            });
        }
        assert_eq!((status.notes.len(), status.findings.len()), (NOTES_MAX, FINDINGS_MAX));
        assert_eq!((status.bad_blocks, status.repaired_blocks), (8192, 8192));
        assert!(status.is_bad("t"), "what is not listed may be anywhere");
    }
}
