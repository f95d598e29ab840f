//! The values that several kinds share.

use std::borrow::Cow;
use std::fmt;
use std::num::{IntErrorKind, ParseIntError};

use lh_block::{Epoch, Generation, Instance};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// True for what need not be written.
pub(super) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Reads `null`, which Go writes for an empty map or list, as the default.
pub(super) fn null_is_default<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: Default + Deserialize<'de>,
    D: Deserializer<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Reads a number of seconds. Of one that is too large to be kept, which the API server lets through, it is the largest: an object that
/// cannot be read would keep all others of its kind from being read.
pub(super) fn seconds<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    let read = Option::<i64>::deserialize(deserializer)?;
    Ok(read.map(|seconds| u32::try_from(seconds.max(0)).unwrap_or(u32::MAX)))
}

/// The number of a text. One that is too large to be kept is the largest, for the same reason.
fn number(text: &str) -> Result<i64, ParseIntError> {
    text.parse().or_else(|e: ParseIntError| match e.kind() {
        IntErrorKind::PosOverflow => Ok(i64::MAX),
        IntErrorKind::NegOverflow => Ok(i64::MIN),
        _ => Err(e),
    })
}

/// A number that Longhorn writes as text, since JavaScript would round it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Int64Text(pub i64);

impl Int64Text {
    /// The number as a count of bytes: what is below zero counts as zero.
    pub fn bytes(self) -> u64 {
        u64::try_from(self.0).unwrap_or_default()
    }

    /// A count of bytes; what is above the largest number becomes that.
    pub fn of_bytes(bytes: u64) -> Self {
        Self(i64::try_from(bytes).unwrap_or(i64::MAX))
    }
}

impl fmt::Display for Int64Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Serialize for Int64Text {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

/// A number, written either way.
#[derive(Deserialize)]
#[serde(untagged)]
enum NumberOrText<'a> {
    Number(i64),
    Text(Cow<'a, str>),
}

impl<'de> Deserialize<'de> for Int64Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Option::<NumberOrText<'de>>::deserialize(deserializer)? {
            None => Ok(Self::default()),
            Some(NumberOrText::Number(number)) => Ok(Self(number)),
            Some(NumberOrText::Text(text)) if text.is_empty() => Ok(Self::default()),
            Some(NumberOrText::Text(text)) => number(&text).map(Self).map_err(de::Error::custom),
        }
    }
}

impl JsonSchema for Int64Text {
    fn schema_name() -> Cow<'static, str> {
        "Int64Text".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "format": "int64", "pattern": "^(-?[0-9]{1,19})?$" })
    }
}

/// An engine's generation, written as text: its upper half is an attachment number, so that it exceeds what JSON's
/// readers keep exactly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GenerationText(pub Generation);

impl Serialize for GenerationText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&u64::from(self.0))
    }
}

impl<'de> Deserialize<'de> for GenerationText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        let number: u64 = text.parse().map_err(de::Error::custom)?;
        Ok(Self(number.into()))
    }
}

impl JsonSchema for GenerationText {
    fn schema_name() -> Cow<'static, str> {
        "GenerationText".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": "^[0-9]{1,20}$" })
    }
}

/// An epoch as the Volume keeps it: one state of the membership (`docs/invariants.md`, 12).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EpochRecord {
    /// The engine that made it.
    pub generation: GenerationText,
    /// Counts the epochs of one engine.
    pub counter: i64,
    /// The replicas that hold every acknowledged write.
    pub members: Vec<String>,
    /// 32 hex digits, another for every epoch that was ever made.
    pub id: String,
}

impl From<&Epoch> for EpochRecord {
    fn from(epoch: &Epoch) -> Self {
        Self {
            generation: GenerationText(epoch.generation),
            counter: i64::try_from(epoch.counter).unwrap_or(i64::MAX),
            members: epoch.members.clone(),
            id: format!("{:032x}", epoch.id.0),
        }
    }
}

impl EpochRecord {
    /// The epoch that the record says.
    ///
    /// # Errors
    /// Text that names the field which no engine wrote.
    pub fn to_epoch(&self) -> Result<Epoch, String> {
        let id = u128::from_str_radix(&self.id, 16).map_err(|e| format!("epoch id {:?}: {e}", self.id))?;
        let counter =
            u64::try_from(self.counter).map_err(|_| format!("epoch counter {} is negative", self.counter))?;
        Ok(Epoch {
            generation: self.generation.0,
            counter,
            members: self.members.clone(),
            id: Instance(id),
            // Who starts by the epoch that is stored here needs no more: its members have recorded that one.
            after: None,
            round: None,
        })
    }
}

/// A condition as Longhorn writes it: all text, and not Kubernetes' own type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Condition {
    /// What the condition is about.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False` or `Unknown`.
    pub status: String,
    /// When it was last looked at, RFC 3339. Not kept, since it would change an object at rest; of `Trimmed` of a
    /// Volume, the request that is answered.
    pub last_probe_time: String,
    /// When the status last changed, RFC 3339.
    pub last_transition_time: String,
    /// One word for programs.
    pub reason: String,
    /// One sentence for people.
    pub message: String,
}

impl Condition {
    /// True if the status says so.
    pub fn is_true(&self) -> bool {
        self.status == "True"
    }
}

/// A list of conditions.
pub trait Conditions {
    /// The condition about that.
    fn get_condition(&self, kind: &str) -> Option<&Condition>;

    /// Says how it is now. The time changes only with the status.
    fn set_condition(&mut self, kind: &str, holds: bool, reason: &str, message: &str, now: &str);

    /// True if the condition is there and true.
    fn holds(&self, kind: &str) -> bool {
        self.get_condition(kind).is_some_and(Condition::is_true)
    }
}

impl Conditions for Vec<Condition> {
    fn get_condition(&self, kind: &str) -> Option<&Condition> {
        self.iter().find(|c| c.kind == kind)
    }

    fn set_condition(&mut self, kind: &str, holds: bool, reason: &str, message: &str, now: &str) {
        let status = if holds { "True" } else { "False" };
        let found = self.iter_mut().find(|c| c.kind == kind);
        let condition = match found {
            Some(condition) => condition,
            None => {
                self.push(Condition { kind: kind.to_owned(), ..Condition::default() });
                let last = self.len() - 1;
                &mut self[last]
            }
        };
        if condition.status != status {
            condition.last_transition_time = now.to_owned();
        }
        condition.status = status.to_owned();
        condition.reason = reason.to_owned();
        condition.message = message.to_owned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_text_and_as_numbers_and_written_as_text() {
        for json in ["\"4096\"", "4096"] {
            assert_eq!(serde_json::from_str::<Int64Text>(json).unwrap(), Int64Text(4096));
        }
        for json in ["\"\"", "null"] {
            assert_eq!(serde_json::from_str::<Int64Text>(json).unwrap(), Int64Text(0));
        }
        assert!(serde_json::from_str::<Int64Text>("\"4k\"").is_err());
        for (json, least_or_most) in
            [("\"9999999999999999999\"", i64::MAX), ("\"-9999999999999999999\"", i64::MIN)]
        {
            assert_eq!(serde_json::from_str::<Int64Text>(json).unwrap(), Int64Text(least_or_most));
        }
        assert_eq!(serde_json::to_string(&Int64Text(-1)).unwrap(), "\"-1\"");
        assert_eq!((Int64Text(-1).bytes(), Int64Text::of_bytes(u64::MAX)), (0, Int64Text(i64::MAX)));
    }

    #[test]
    fn an_epoch_survives_the_way_through_the_volume() {
        let epoch = Epoch {
            generation: Generation { attachment: 7, restart: 3 },
            counter: 12,
            members: vec!["a".to_owned(), "b".to_owned()],
            id: Instance(u128::MAX - 5),
            after: None,
            round: None,
        };
        let json = serde_json::to_string(&EpochRecord::from(&epoch)).unwrap();
        assert!(json.contains("\"generation\":\"30064771075\""), "{json}");
        let record: EpochRecord = serde_json::from_str(&json).unwrap();
        assert_eq!(record.to_epoch().unwrap(), epoch);
        let damaged = EpochRecord { id: "xyz".into(), ..record };
        assert!(damaged.to_epoch().is_err());
    }

    #[test]
    fn a_condition_changes_its_time_only_with_its_status() {
        let mut conditions = Vec::new();
        conditions.set_condition("Ready", true, "", "", "1");
        conditions.set_condition("Ready", true, "Again", "still", "2");
        let ready = conditions.get_condition("Ready").unwrap();
        assert_eq!((ready.last_transition_time.as_str(), ready.reason.as_str()), ("1", "Again"));
        conditions.set_condition("Ready", false, "Gone", "", "3");
        assert_eq!(conditions.get_condition("Ready").unwrap().last_transition_time, "3");
        assert!(!conditions.holds("Ready") && !conditions.holds("Schedulable"));
        assert_eq!(conditions.len(), 1);
    }
}
