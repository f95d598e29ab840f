//! Every service, message, field and enum value declared here has the name, number and type that Longhorn gives it.
//!
//! `longhorn-grpc.tsv` is the list of what Longhorn declares for these services. Whatever the list has must be in the
//! descriptors and the other way round; only fields numbered from 1000 on are this project's own.

use std::collections::BTreeSet;

use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

/// Fields from this number on are not Longhorn's.
const OWN_FIELDS: i32 = 1000;

const PUBLISHED: &str = include_str!("longhorn-grpc.tsv");

/// A row of the list, columns as in its first line.
type Row = [String; 6];

fn published() -> BTreeSet<Row> {
    PUBLISHED
        .lines()
        .skip(1)
        .map(|line| {
            let mut columns: Vec<String> = line.split('\t').map(str::to_owned).collect();
            columns.resize(6, String::new());
            columns.try_into().unwrap()
        })
        // A message without fields has no row; an empty request is compared by the rpc that takes it.
        .collect()
}

fn declared() -> BTreeSet<Row> {
    let set = FileDescriptorSet::decode(control::proto::DESCRIPTORS).unwrap();
    let mut rows = BTreeSet::new();
    for file in &set.file {
        let package = match file.package() {
            // The second is this project's own.
            "google.protobuf" | "longhorn.volume" => continue,
            "" => "(none)",
            package => package,
        };
        let mut row = |kind: &str, of: &str, name: &str, number: &str, kind_of: &str| {
            rows.insert([kind, package, of, name, number, kind_of].map(str::to_owned));
        };
        for service in &file.service {
            for rpc in &service.method {
                let stream = if rpc.server_streaming() { "stream " } else { "" };
                let answer = format!("{stream}{}", short(rpc.output_type(), package));
                row("rpc", service.name(), rpc.name(), &short(rpc.input_type(), package), &answer);
            }
        }
        for message in &file.message_type {
            for field in message.field.iter().filter(|f| f.number() < OWN_FIELDS) {
                let number = field.number().to_string();
                row("field", message.name(), field.name(), &number, &kind_of(field, message, package));
            }
        }
        for values in &file.enum_type {
            for value in &values.value {
                row("enum", values.name(), value.name(), &value.number().to_string(), "");
            }
        }
    }
    rows
}

/// `.ptypes.Volume` as the list writes it: with its package where it is another one.
fn short(name: &str, package: &str) -> String {
    let name = name.trim_start_matches('.');
    name.strip_prefix(package).and_then(|rest| rest.strip_prefix('.')).unwrap_or(name).to_owned()
}

/// A field's type as the list writes it.
fn kind_of(field: &FieldDescriptorProto, message: &DescriptorProto, package: &str) -> String {
    let scalar = match field.r#type() {
        Type::String => "string".to_owned(),
        Type::Bytes => "bytes".to_owned(),
        Type::Bool => "bool".to_owned(),
        Type::Int32 => "int32".to_owned(),
        Type::Int64 => "int64".to_owned(),
        Type::Uint32 => "uint32".to_owned(),
        Type::Uint64 => "uint64".to_owned(),
        Type::Double => "double".to_owned(),
        Type::Message | Type::Enum => short(field.type_name(), package),
        other => panic!("{} is a {other:?}", field.name()),
    };
    if field.label() != Label::Repeated {
        return scalar;
    }
    let entry_name = scalar.rsplit('.').next().unwrap();
    match message.nested_type.iter().find(|n| n.name() == entry_name) {
        Some(entry) => {
            let of = |i: usize| kind_of(&entry.field[i], entry, package);
            format!("map<{},{}>", of(0), of(1))
        }
        None => format!("repeated {scalar}"),
    }
}

#[test]
fn what_is_declared_is_what_longhorn_declares() {
    let (published, declared) = (published(), declared());
    assert!(published.len() > 600, "the list is cut short");
    let missing: Vec<_> = published.difference(&declared).collect();
    let different: Vec<_> = declared.difference(&published).collect();
    assert!(
        missing.is_empty() && different.is_empty(),
        "missing {missing:#?}\nnot Longhorn's {different:#?}"
    );
}
