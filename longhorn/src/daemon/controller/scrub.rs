//! A scrub in the words of the control plane.

use control::engine::{ScrubFinding, ScrubProgress};
use datapath::conductor::{Finding, Flaw, Mend, ScrubStatus};

pub(super) fn progress(status: ScrubStatus) -> ScrubProgress {
    ScrubProgress {
        running: status.running,
        repair: status.repair,
        doing: status.doing,
        done: status.done,
        total: status.total,
        findings: status.findings.into_iter().map(finding).collect(),
        bad_blocks: status.bad_blocks,
        repaired_blocks: status.repaired_blocks,
        notes: status.notes,
        error: status.error.unwrap_or_default(),
    }
}

fn finding(of: Finding) -> ScrubFinding {
    ScrubFinding {
        replica: of.replica,
        layer: of.layer,
        offset: of.range.offset,
        length: of.range.len,
        flaw: match of.flaw {
            Flaw::Rotten => "rotten",
            Flaw::Differs => "differs",
        },
        done: match of.mend {
            Mend::Reported => "reported",
            Mend::Repaired => "repaired",
            Mend::NoSource => "no_source",
            Mend::Unsure => "unsure",
            Mend::Conflict => "conflict",
            Mend::Failed => "failed",
        },
    }
}
