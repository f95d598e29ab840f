//! The smallest change from one object to another, as a JSON merge patch (RFC 7396): a writer changes only what it
//! means to, whatever others write beside it.

use serde::Serialize;
use serde_json::{Map, Value};

/// The patch from `old` to `new`; `None`: they are equal. Lists are replaced as a whole.
pub(super) fn difference(old: &Value, new: &Value) -> Option<Value> {
    if old == new {
        return None;
    }
    let (Value::Object(old), Value::Object(new)) = (old, new) else { return Some(new.clone()) };
    let mut patch = Map::new();
    for (key, value) in new {
        let change = match old.get(key) {
            Some(before) => difference(before, value),
            None => Some(value.clone()),
        };
        if let Some(change) = change {
            patch.insert(key.clone(), change);
        }
    }
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    Some(Value::Object(patch))
}

/// The patch of one part (`spec`, `status`) of an object that was read at that version; `None`: nothing changes. The API
/// server refuses it if the object has changed since.
pub(super) fn of_part<T: Serialize>(part: &str, old: &T, new: &T, version: Option<&str>) -> Option<Value> {
    let (old, new) = (serde_json::to_value(old).ok()?, serde_json::to_value(new).ok()?);
    let mut patch = Map::new();
    patch.insert(part.to_owned(), difference(&old, &new)?);
    if let Some(version) = version {
        patch.insert("metadata".to_owned(), serde_json::json!({ "resourceVersion": version }));
    }
    Some(Value::Object(patch))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;
    use serde_json::json;

    use super::*;

    /// RFC 7396, section 2.
    fn apply(target: &mut Value, patch: &Value) {
        let Value::Object(patch) = patch else {
            target.clone_from(patch);
            return;
        };
        if !target.is_object() {
            *target = json!({});
        }
        let Value::Object(target) = target else { return };
        for (key, value) in patch {
            if value.is_null() {
                target.remove(key);
            } else {
                apply(target.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![any::<bool>().prop_map(Value::from), (0..5_i64).prop_map(Value::from)];
        leaf.prop_recursive(3, 20, 4, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
                prop::collection::btree_map("[a-d]", inner, 0..4).prop_map(|m| json!(m)),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 500, rng_seed: RngSeed::Fixed(7), failure_persistence: None, ..ProptestConfig::default()
        })]
        #[test]
        fn a_patch_leads_from_one_to_the_other(old in any_json(), new in any_json()) {
            let mut patched = old.clone();
            if let Some(patch) = difference(&old, &new) {
                apply(&mut patched, &patch);
            }
            prop_assert_eq!(patched, new);
        }
    }

    #[test]
    fn only_what_changes_is_in_it() {
        let (old, new) = (json!({"a": 1, "b": {"c": 2, "d": 3}}), json!({"a": 1, "b": {"c": 4}}));
        let patch = of_part("spec", &old, &new, Some("7")).unwrap();
        assert_eq!(patch, json!({"spec": {"b": {"c": 4, "d": null}}, "metadata": {"resourceVersion": "7"}}));
        assert_eq!(of_part("spec", &old, &old, Some("7")), None);
    }
}
