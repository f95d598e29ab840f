//! Whether `docs/formats/host.md` names what the records are written with.

use std::fs;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

/// The keys of a record, and of the objects in it, that this section does not name.
pub(crate) fn unnamed(section: &str, record: &impl Serialize) -> Vec<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/formats/host.md");
    let text = fs::read_to_string(page).unwrap();
    let (_, rest) = text.split_once(&format!("\n## {section}\n")).expect("the section is there");
    let table = rest.split("\n## ").next().unwrap_or_default();
    let mut keys = Vec::new();
    collect(&serde_json::to_value(record).unwrap(), &mut keys);
    assert!(!keys.is_empty());
    keys.retain(|key| !table.contains(&format!("`{key}`")));
    keys
}

fn collect(value: &Value, keys: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                keys.push(key.clone());
                collect(value, keys);
            }
        }
        Value::Array(values) => values.iter().for_each(|value| collect(value, keys)),
        _ => {}
    }
}
