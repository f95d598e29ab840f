//! Settings: a value that cannot be understood would leave the default in force, unnoticed.

use kube::ResourceExt;

use super::{Change, Verdict};
use crate::api::Setting;
use crate::settings::definition;

pub(super) fn judge(change: Change<'_, Setting>) -> Verdict {
    let setting = match change {
        Change::Create(new) => new,
        Change::Update { old, new } if old.spec.value != new.spec.value => new,
        Change::Update { .. } | Change::Delete(_) => return Ok(Vec::new()),
    };
    let name = setting.name_any();
    match definition(&name) {
        // Longhorn's lists of settings may be applied whole.
        None => {
            Ok(vec![format!("{name} is no setting of this version: it is stored and nothing acts on it")])
        }
        Some(known) => {
            known.check(&setting.spec.value)?;
            let idle = known.idle.map(|why| format!("{name} is stored and nothing acts on it: {why}"));
            Ok(idle.into_iter().collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::SettingSpec;

    fn setting(name: &str, value: &str) -> Setting {
        Setting::new(name, SettingSpec { value: value.to_owned() })
    }

    #[test]
    fn values_are_what_the_setting_takes() {
        let cases = [
            ("default-replica-count", "2", Ok(0)),
            ("default-replica-count", "21", Err("from 1 to 20")),
            ("auto-salvage", "yes", Err("true or false")),
            ("replica-auto-balance", "most", Err("one of disabled")),
            ("log-level", "debug", Ok(0)),
            ("log-level", "loud", Err("one of Panic")),
            ("backup-concurrent-limit", "3", Ok(1)),
            ("v2-data-engine", "true", Ok(1)),
        ];
        for (name, value, expected) in cases {
            let new = setting(name, value);
            match (judge(Change::Create(&new)), expected) {
                (Ok(warnings), Ok(count)) => assert_eq!(warnings.len(), count, "{name}: {warnings:?}"),
                (Err(refused), Err(says)) => assert!(refused.contains(says), "{refused}"),
                (verdict, _) => panic!("{name}={value}: {verdict:?}"),
            }
        }
    }

    #[test]
    fn one_that_was_wrong_before_may_be_labelled() {
        let (old, new) = (setting("auto-salvage", "yes"), setting("auto-salvage", "yes"));
        judge(Change::Update { old: &old, new: &new }).unwrap();
        assert!(judge(Change::Update { old: &old, new: &setting("auto-salvage", "no") }).is_err());
    }
}
