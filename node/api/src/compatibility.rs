//! Names and numbers of the protocol buffers, compared with the committed list `schema.txt`.
//!
//! Nodes, operators and stored records of different releases depend on them, so what is in the list
//! must stay; see `docs/compatibility.md`. New entries are added to the list by
//! `HEARTH_WRITE_SCHEMA=1 cargo test -p hearth-api compatibility`.

use std::collections::BTreeSet;
use std::path::Path;

use prost_reflect::{DescriptorPool, EnumDescriptor, MessageDescriptor, ServiceDescriptor};

const WRITE: &str = "HEARTH_WRITE_SCHEMA";

#[test]
fn names_and_numbers_only_ever_grow() {
    let pool = DescriptorPool::decode(crate::FILE_DESCRIPTOR_SET).expect("descriptors");
    let ours = |name: &str| name.starts_with("hearth.");
    let mut current = BTreeSet::new();
    for message in pool.all_messages().filter(|m| ours(m.full_name())) {
        fields(&message, &mut current);
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
    let removed: Vec<_> = committed.difference(&current).collect();
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
