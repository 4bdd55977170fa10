//! Checks the readers and writers of the values that the parts of a node share.
//!
//! The fields of a worker's struct declare what it reads and writes: a `Value<T>` is read, a
//! `Writer<T>` is written, under the field's name. So the declaration cannot differ from the code.
//! This test parses the structs, checks that each value has one writer and one type, and compares
//! the table in `docs/architecture.md` with the result. With [`WRITE`] in the environment it
//! writes the table.
#![allow(clippy::disallowed_methods, reason = "test code")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use syn::{Fields, GenericArgument, Item, PathArguments, Type};

/// Environment variable: if set, the table is written instead of compared.
const WRITE: &str = "HEARTH_WRITE_DOCS";

/// A worker's name in the log, its file below `node/`, and its struct.
const WORKERS: &[(&str, &str, &str)] = &[
    ("network", "core/src/network.rs", "Network"),
    ("network control", "core/src/network/control.rs", "Control"),
    ("state", "host/src/cluster_state.rs", "Worker"),
    ("enrolment", "enrolment/src/driver.rs", "Parts"),
    ("unlock", "enrolment/src/unlocking.rs", "Worker"),
    ("storage", "host/src/storage/upkeep.rs", "Worker"),
    ("volumes", "host/src/disks/volumes.rs", "Worker"),
    ("rejoin", "enrolment/src/rejoin.rs", "Parts"),
    ("controlplane", "core/src/controlplane/mod.rs", "Worker"),
    ("rolefetch", "agent/src/rolefetch.rs", "Worker"),
    ("membership", "agent/src/connection.rs", "Worker"),
    ("heartbeat", "agent/src/heartbeat.rs", "Worker"),
    ("hosts", "agent/src/hosts.rs", "Worker"),
    ("addresses", "agent/src/addresses/mod.rs", "Worker"),
    ("firewall", "kubernetes/src/firewall/mod.rs", "Worker"),
    ("mesh", "kubernetes/src/mesh/mod.rs", "Worker"),
    ("kubernetes", "kubernetes/src/lib.rs", "Worker"),
    ("nodemgmt", "agent/src/nodemgmt.rs", "Worker"),
    ("statuspush", "agent/src/statuspush.rs", "Worker"),
    ("sysctls", "agent/src/sysctls.rs", "Worker"),
    ("time", "agent/src/time/mod.rs", "Worker"),
];

/// Types that wrap a value or its writer under another name.
const HANDLES: &[(&str, Access, &str)] = &[
    ("ClusterState", Access::Reads, "cluster_state"),
    ("cluster_state::Writer", Access::Writes, "cluster_state"),
    ("AddressBook", Access::Writes, "learned"),
];

/// Values with several writers: a count, and peer addresses from several sources.
const SHARED: &[&str] = &["refusals", "learned"];

/// Values that no worker reads.
const SHOWN: &[&str] = &["status"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Reads,
    Writes,
}

#[derive(Default)]
struct Use {
    types: BTreeSet<String>,
    writers: Vec<&'static str>,
    readers: Vec<&'static str>,
}

fn node() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The values that the fields of a worker's struct declare: name, access, type.
fn fields(file: &str, name: &str) -> Vec<(String, Access, String)> {
    let path = node().join(file);
    let source = std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{file}: {e}"));
    let parsed = syn::parse_file(&source).unwrap_or_else(|e| panic!("{file}: {e}"));
    let found = parsed.items.into_iter().find_map(|item| match item {
        Item::Struct(item) if item.ident == name => Some(item.fields),
        _ => None,
    });
    let Some(Fields::Named(fields)) = found else {
        panic!("{file} has no struct {name} with named fields");
    };
    let of = |field: syn::Field| {
        let name = field.ident.expect("a named field").to_string();
        let (access, named, carried) = access(file, &field.ty)?;
        Some((named.unwrap_or(name), access, carried))
    };
    fields.named.into_iter().filter_map(of).collect()
}

/// Whether a type is a value or a writer, its name if that is not the field's, and its content.
fn access(file: &str, ty: &Type) -> Option<(Access, Option<String>, String)> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last()?;
    let whole: Vec<String> = path
        .path
        .segments
        .iter()
        .map(|s| s.ident.to_string())
        .collect();
    let argument = match &last.arguments {
        PathArguments::AngleBracketed(arguments) => match arguments.args.first()? {
            GenericArgument::Type(ty) => Some(ty),
            _ => None,
        },
        _ => None,
    };
    match (last.ident.to_string().as_str(), argument) {
        ("Arc", Some(inner)) => access(file, inner),
        ("Value", Some(carried)) => Some((Access::Reads, None, text(carried))),
        ("Writer", Some(carried)) => Some((Access::Writes, None, text(carried))),
        _ => {
            let mut whole = whole.join("::");
            // In its own module the type has no path.
            if whole == "Writer" && file.ends_with("cluster_state.rs") {
                whole = "cluster_state::Writer".into();
            }
            let handle = HANDLES.iter().find(|(name, ..)| *name == whole)?;
            Some((handle.1, Some(handle.2.to_owned()), String::new()))
        }
    }
}

/// A type as written, with only the last segment of each path.
fn text(ty: &Type) -> String {
    let Type::Path(path) = ty else {
        return "a type".into();
    };
    let last = path.path.segments.last().expect("a path has a part");
    let name = last.ident.to_string();
    match &last.arguments {
        PathArguments::AngleBracketed(arguments) => {
            let inner = arguments.args.iter().filter_map(|argument| match argument {
                GenericArgument::Type(ty) => Some(text(ty)),
                _ => None,
            });
            format!("{name}<{}>", inner.collect::<Vec<_>>().join(", "))
        }
        _ => name,
    }
}

fn values() -> BTreeMap<String, Use> {
    let mut values: BTreeMap<String, Use> = BTreeMap::new();
    for (worker, file, name) in WORKERS {
        for (value, access, carried) in fields(file, name) {
            let found = values.entry(value).or_default();
            if !carried.is_empty() {
                // Enrolment is generic over the address: it only waits until there is one.
                found.types.insert(if carried == "A" {
                    "IpAddr".into()
                } else {
                    carried
                });
            }
            let list = match access {
                Access::Reads => &mut found.readers,
                Access::Writes => &mut found.writers,
            };
            if !list.contains(worker) {
                list.push(worker);
            }
        }
    }
    values
}

#[test]
fn each_value_has_one_writer_and_one_type() {
    for (name, found) in values() {
        let shared = SHARED.contains(&name.as_str());
        assert!(
            found.writers.len() == 1 || shared && found.writers.len() > 1,
            "{name}: expected one writer, got {:?}",
            found.writers
        );
        assert!(
            found.types.len() <= 1,
            "{name}: expected one type, got {:?}",
            found.types
        );
        let shown = SHOWN.contains(&name.as_str());
        assert!(!found.readers.is_empty() || shown, "{name}: no reader");
    }
}

#[test]
fn the_table_in_the_documentation_is_what_the_workers_declare() {
    const BEGIN: &str = "<!-- values: made by node/core/tests/values.rs -->\n";
    const END: &str = "<!-- values end -->\n";
    let mut table = String::from("| value | written by | read by |\n|---|---|---|\n");
    for (name, found) in values() {
        let readers = match found.readers.is_empty() {
            true => "no worker".to_owned(),
            false => found.readers.join(", "),
        };
        table += &format!("| `{name}` | {} | {readers} |\n", found.writers.join(", "));
    }
    let path = node().join("../docs/architecture.md");
    let page = std::fs::read_to_string(&path).expect("the documentation");
    let (before, rest) = page.split_once(BEGIN).expect("the marker before the table");
    let (stands, after) = rest.split_once(END).expect("the marker after the table");
    if std::env::var_os(WRITE).is_some() {
        let page = format!("{before}{BEGIN}{table}{END}{after}");
        std::fs::write(&path, page).expect("the documentation can be written");
        return;
    }
    assert!(
        stands == table,
        "docs/architecture.md is out of date; run {WRITE}=1 cargo test -p hearth-core --test values\nexpected:\n{table}"
    );
}
