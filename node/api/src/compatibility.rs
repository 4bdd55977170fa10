//! Names and numbers of the protocol buffers, compared with the committed list `schema.txt`.
//!
//! Nodes, operators and stored records of different releases depend on them, so what is in the list
//! must stay; see `docs/compatibility.md`. A field may be removed if its number and its name are
//! reserved. The list is brought up to date by
//! `HEARTH_WRITE_SCHEMA=1 cargo test -p hearth-api compatibility`.

use std::collections::BTreeSet;
use std::path::Path;

use prost_reflect::{DescriptorPool, EnumDescriptor, MessageDescriptor, ServiceDescriptor};

const WRITE: &str = "HEARTH_WRITE_SCHEMA";

#[test]
fn names_and_numbers_stay_or_are_reserved() {
    let pool = DescriptorPool::decode(crate::FILE_DESCRIPTOR_SET).expect("descriptors");
    let ours = |name: &str| name.starts_with("hearth.");
    let mut current = BTreeSet::new();
    for message in pool.all_messages().filter(|m| ours(m.full_name())) {
        fields(&message, &mut current);
        reserved(&message, &mut current);
    }
    for values in pool.all_enums().filter(|e| ours(e.full_name())) {
        constants(&values, &mut current);
    }
    for service in pool.services().filter(|s| ours(s.full_name())) {
        methods(&service, &mut current);
    }

    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("schema.txt");
    let text = std::fs::read_to_string(&path).unwrap_or_default();
    let committed: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    let removed = committed.difference(&current);
    let removed: Vec<_> = removed
        .filter(|line| !is_reserved(line, &current))
        .collect();
    assert!(removed.is_empty(), "removed or changed: {removed:#?}");
    if std::env::var_os(WRITE).is_some() {
        let lines: Vec<String> = current.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&path, lines.concat()).expect("write the list");
        return;
    }
    let added: Vec<_> = current.difference(&committed).collect();
    assert!(
        added.is_empty(),
        "not in schema.txt, {WRITE}=1 adds them: {added:#?}"
    );
}

fn fields(message: &MessageDescriptor, lines: &mut BTreeSet<String>) {
    for field in message.fields() {
        lines.insert(format!(
            "field {} {} {} {:?} {:?}",
            message.full_name(),
            field.number(),
            field.name(),
            field.cardinality(),
            field.kind(),
        ));
    }
}

/// The numbers and names that no field may have again.
fn reserved(message: &MessageDescriptor, lines: &mut BTreeSet<String>) {
    let name = message.full_name();
    for number in message.reserved_ranges().flatten() {
        lines.insert(format!("reserved {name} {number}"));
    }
    for field in message.reserved_names() {
        lines.insert(format!("reserved {name} {field}"));
    }
}

/// Whether the line is about a field whose number and name are both reserved.
fn is_reserved(line: &str, current: &BTreeSet<String>) -> bool {
    let words: Vec<_> = line.split(' ').collect();
    let ["field", message, number, name, ..] = words[..] else {
        return false;
    };
    [number, name]
        .iter()
        .all(|word| current.contains(&format!("reserved {message} {word}")))
}

#[test]
fn a_removed_field_has_to_be_reserved_by_number_and_by_name() {
    let current = ["reserved a.M 1", "reserved a.M old", "reserved a.M 2"];
    let current = current.map(str::to_owned).into();
    for (line, expected) in [
        ("field a.M 1 old Optional string", true),
        ("field a.M 2 other Optional string", false),
        ("field a.M 3 old Optional string", false),
        ("field a.N 1 old Optional string", false),
        ("value a.M 1 old", false),
    ] {
        assert_eq!(is_reserved(line, &current), expected, "{line}");
    }
}

fn constants(values: &EnumDescriptor, lines: &mut BTreeSet<String>) {
    for value in values.values() {
        let (number, name) = (value.number(), value.name());
        lines.insert(format!("value {} {number} {name}", values.full_name()));
    }
}

fn methods(service: &ServiceDescriptor, lines: &mut BTreeSet<String>) {
    for method in service.methods() {
        let stream = |is_streaming: bool| if is_streaming { "stream " } else { "" };
        lines.insert(format!(
            "method {} {}{} -> {}{}",
            method.full_name(),
            stream(method.is_client_streaming()),
            method.input().full_name(),
            stream(method.is_server_streaming()),
            method.output().full_name(),
        ));
    }
}
