//! Every service, message, field and enum value of CSI 1.12 is declared with its name, number and type.
//!
//! `csi-spec.tsv` lists what the specification declares.

use std::collections::BTreeSet;

use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorSet};

const PUBLISHED: &str = include_str!("csi-spec.tsv");

const PACKAGE: &str = "csi.v1";

/// Kind, what it is of, name, number or request, type or answer.
type Row = [String; 5];

fn published() -> BTreeSet<Row> {
    let row = |line: &str| {
        let mut columns: Vec<&str> = line.split('\t').collect();
        columns.resize(6, "");
        [columns[0], columns[2], columns[3], columns[4], columns[5]].map(str::to_owned)
    };
    // The list writes some of these with a dot before them and some without.
    PUBLISHED.lines().skip(1).map(|line| row(&line.replace("\t.google", "\tgoogle"))).collect()
}

fn declared() -> BTreeSet<Row> {
    let set = FileDescriptorSet::decode(csi::proto::DESCRIPTORS).unwrap();
    let mut rows = BTreeSet::new();
    for file in set.file.iter().filter(|f| f.package() == PACKAGE) {
        for service in &file.service {
            for rpc in &service.method {
                let stream = if rpc.server_streaming() { "stream " } else { "" };
                let answer = format!("{stream}{}", last(rpc.output_type()));
                rows.insert(
                    ["rpc", service.name(), rpc.name(), last(rpc.input_type()), &answer].map(str::to_owned),
                );
            }
        }
        file.message_type.iter().for_each(|m| message(m, m.name(), &mut rows));
        file.enum_type.iter().for_each(|e| values(e, e.name(), &mut rows));
    }
    rows
}

fn message(m: &DescriptorProto, name: &str, rows: &mut BTreeSet<Row>) {
    for field in &m.field {
        let kind = kind_of(field, m);
        rows.insert(["field", name, field.name(), &field.number().to_string(), &kind].map(str::to_owned));
    }
    m.nested_type.iter().for_each(|n| message(n, &format!("{name}.{}", n.name()), rows));
    m.enum_type.iter().for_each(|e| values(e, &format!("{name}.{}", e.name()), rows));
}

fn values(e: &EnumDescriptorProto, name: &str, rows: &mut BTreeSet<Row>) {
    for value in &e.value {
        rows.insert(["enum", name, value.name(), &value.number().to_string(), ""].map(str::to_owned));
    }
}

fn last(name: &str) -> &str {
    name.rsplit('.').next().unwrap()
}

/// A field's type as the list writes it.
fn kind_of(field: &FieldDescriptorProto, m: &DescriptorProto) -> String {
    let scalar = match field.r#type() {
        Type::String => "string".to_owned(),
        Type::Bool => "bool".to_owned(),
        Type::Int32 => "int32".to_owned(),
        Type::Int64 => "int64".to_owned(),
        Type::Message | Type::Enum if field.type_name().starts_with(".google") => {
            field.type_name().trim_start_matches('.').to_owned()
        }
        Type::Message | Type::Enum => last(field.type_name()).to_owned(),
        other => panic!("{} is a {other:?}", field.name()),
    };
    let is_map =
        m.nested_type.iter().any(|n| n.name() == scalar && n.options.as_ref().is_some_and(|o| o.map_entry()));
    let kind = match field.label() {
        _ if is_map => "map<string,string>".to_owned(),
        Label::Repeated => format!("repeated {scalar}"),
        _ => scalar,
    };
    match field.oneof_index {
        Some(index) => {
            let index = usize::try_from(index).unwrap();
            format!("{kind} (oneof {})", m.oneof_decl[index].name())
        }
        None => kind,
    }
}

#[test]
fn what_is_declared_is_what_the_specification_declares() {
    let published = published();
    // The entries of maps are messages of their own for the compiler.
    let declared: BTreeSet<Row> = declared()
        .into_iter()
        .filter(|row| !row[1].ends_with("Entry") || published.iter().any(|p| p[1] == row[1]))
        .collect();
    assert!(published.len() > 250, "the list is cut short");
    let missing: Vec<_> = published.difference(&declared).collect();
    let different: Vec<_> = declared.difference(&published).collect();
    assert!(
        missing.is_empty() && different.is_empty(),
        "missing {missing:#?}\nnot the specification's {different:#?}"
    );
}
