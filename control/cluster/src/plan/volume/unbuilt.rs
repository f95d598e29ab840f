//! Volumes that ask for what is not built: refused, in words, before anything of them exists. A volume that should hold a
//! backup's data or decrypt its own would otherwise be handed out empty or bare.

use super::SCHEDULED;
use super::clone::Source;
use super::draft::Draft;
use crate::api::{Conditions, DataEngine, Frontend, VolumeSpec};

/// The reason in the condition.
pub const NOT_BUILT: &str = "NotBuilt";

/// What a volume asks for that is not built; `None`: nothing.
pub fn unbuilt(spec: &VolumeSpec) -> Option<&'static str> {
    let cases = [
        (spec.data_engine == DataEngine::V2, "the v2 data engine (dataEngine)"),
        (spec.frontend == Frontend::Nvmf, "the frontend nvmf, which only the v2 data engine has"),
        (!spec.from_backup.is_empty(), "restoring a backup (fromBackup)"),
        (
            !spec.data_source.is_empty() && Source::parse(&spec.data_source).is_none(),
            "a dataSource that is neither vol://VOLUME nor snap://VOLUME/SNAPSHOT",
        ),
        (!spec.backing_image.is_empty(), "backing images (backingImage)"),
        (spec.standby, "standby volumes (Standby)"),
        (spec.encrypted, "encryption (encrypted)"),
        (spec.data_layout.kind == "sharded", "sharded volumes (dataLayout)"),
    ];
    cases.into_iter().find(|(asked, _)| *asked).map(|(_, what)| what)
}

impl Draft<'_> {
    /// True if the volume asks for what is not built. One that has replicas already is left as it is: its data was made
    /// by somebody who could.
    pub(super) fn refuse_unbuilt(&mut self) -> bool {
        let mut spec = self.o.volume.spec.clone();
        if self.was_restored() {
            spec.from_backup.clear();
        }
        let Some(what) = unbuilt(&spec) else { return false };
        let message = format!("this version cannot do that yet: {what}");
        let is_known = self.status.conditions.get_condition(SCHEDULED).is_some_and(|c| c.reason == NOT_BUILT);
        let now = self.now.clone();
        self.status.conditions.set_condition(SCHEDULED, false, NOT_BUILT, &message, &now);
        if !is_known {
            self.tell(true, NOT_BUILT, message);
        }
        true
    }

    /// True for a volume that Longhorn has filled with a backup: it names that for ever, and is a volume as any other.
    fn was_restored(&self) -> bool {
        let (begun, due) = (self.status.restore_initiated, self.status.restore_required);
        begun && !due && self.o.replicas.iter().any(|r| !r.spec.healthy_at.is_empty())
    }
}
