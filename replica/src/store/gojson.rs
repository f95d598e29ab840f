//! JSON as Go's `encoding/json` writes it: Longhorn's own files are compared byte by byte by people and by tests.
//!
//! Keys keep the order in which they are added; there is no white space; `<`, `>`, `&`, U+2028 and U+2029 are escaped
//! (Go's default, `SetEscapeHTML(true)`); the text ends with the newline that `Encoder.Encode` adds.

use std::collections::BTreeMap;
use std::fmt::Write;

/// One JSON object that is being written.
pub(super) struct Object {
    text: String,
}

impl Object {
    pub(super) fn new() -> Self {
        Self { text: "{".into() }
    }

    fn key(&mut self, key: &str) {
        if self.text.len() > 1 {
            self.text.push(',');
        }
        string(&mut self.text, key);
        self.text.push(':');
    }

    pub(super) fn number(mut self, key: &str, value: i64) -> Self {
        self.key(key);
        self.text.push_str(&value.to_string());
        self
    }

    pub(super) fn boolean(mut self, key: &str, value: bool) -> Self {
        self.key(key);
        self.text.push_str(if value { "true" } else { "false" });
        self
    }

    pub(super) fn string(mut self, key: &str, value: &str) -> Self {
        self.key(key);
        string(&mut self.text, value);
        self
    }

    /// A `map[string]string`; the empty one as `null`, since Longhorn never makes an empty map.
    pub(super) fn map(mut self, key: &str, value: &BTreeMap<String, String>) -> Self {
        self.key(key);
        if value.is_empty() {
            self.text.push_str("null");
            return self;
        }
        let mut inner = Self::new();
        for (k, v) in value {
            inner = inner.string(k, v);
        }
        self.text.push_str(&inner.text);
        self.text.push('}');
        self
    }

    /// The whole file.
    pub(super) fn finish(mut self) -> Vec<u8> {
        self.text.push_str("}\n");
        self.text.into_bytes()
    }
}

fn string(out: &mut String, value: &str) {
    out.push('"');
    for c in value.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            // Since Go 1.22; before, \b and \f were written as \u0008 and \u000c.
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' | '\0'..='\u{1f}' => {
                // Writing into a String cannot fail.
                let _ = write!(out, "\\u{:04x}", u32::from(c));
            }
            _ => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_gos() {
        let text = Object::new()
            .string("k<", "a & b\u{2028}\u{2029}\"\\\n\r\t\u{8}\u{c}\u{1}\u{7f}ä")
            .number("n", -5)
            .boolean("b", true)
            .finish();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "{\"k\\u003c\":\"a \\u0026 b\\u2028\\u2029\\\"\\\\\\n\\r\\t\\b\\f\\u0001\u{7f}ä\",\"n\":-5,\"b\":true}\n"
        );
    }

    #[test]
    fn maps_are_sorted_and_the_empty_one_is_null() {
        let map =
            BTreeMap::from([("purpose".to_owned(), "golden".to_owned()), ("note".into(), "<c>".into())]);
        let text = Object::new().map("L", &map).map("M", &BTreeMap::new()).finish();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "{\"L\":{\"note\":\"\\u003cc\\u003e\",\"purpose\":\"golden\"},\"M\":null}\n"
        );
    }
}
