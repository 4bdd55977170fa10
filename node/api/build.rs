//! Generates what `src/` includes: messages, clients and servers, the descriptor set, the table of
//! who may call what, and the field tables of messages that are decoded strictly.
//!
//! protox compiles the proto files in this process, so a build does not need `protoc`. The method
//! option `hearth.v1.authorization` is read through reflection, because prost's own descriptors
//! drop extensions. A method without the option gets no row in the table and so is refused; a test
//! of the crate (`permissions.rs`) reports it.
#![allow(
    clippy::disallowed_methods,
    reason = "what a build script writes need not be durable"
)]

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use prost_reflect::{
    DescriptorPool, DynamicMessage, FieldDescriptor, Kind, MessageDescriptor, ReflectMessage, Value,
};

/// Messages with a secret in one of their own fields. Their `Debug` is written by hand in
/// `src/redacted.rs`.
const SECRET_BEARING: &[&str] = &[
    ".hearth.v1.ClusterBootstrap",
    ".hearth.v1.ClusterRegister",
    ".hearth.v1.GetRegisterTicketResponse",
    ".hearth.v1.RegisterNodeRequest",
    ".hearth.v1.CommitNodeRequest",
    ".hearth.v1.JoinNodeResponse.Admitted",
    ".hearth.private.v1.SealedConfiguration",
    ".hearth.private.v1.Registering",
    ".hearth.private.v1.StoredTicket",
    ".hearth.private.v1.Founding",
    ".hearth.private.v1.StoredNode",
    ".hearth.private.v1.StoredCluster",
    ".hearth.private.v1.StoredAuthority",
    ".hearth.private.v1.StoredKubernetesAuthorities",
    ".hearth.private.v1.StoredMesh",
    ".hearth.private.v1.StoredControllerKey",
];

/// Messages whose readers reject unknown fields. The messages in their fields get tables as well.
const STRICTLY_READ: &[&str] = &["hearth.v1.NodeParameters"];

fn main() -> Result<(), Box<dyn Error>> {
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    println!("cargo::rerun-if-changed=proto");

    let mut compiler = protox::Compiler::new(["proto"])?;
    compiler
        .include_imports(true)
        .include_source_info(true)
        .open_files(proto_files(Path::new("proto"))?)?;

    tonic_prost_build::configure()
        .skip_debug(SECRET_BEARING)
        .compile_fds(compiler.file_descriptor_set())?;

    // Only the generator needs the comments.
    compiler.include_source_info(false);
    fs::write(
        out.join("descriptors.bin"),
        compiler.encode_file_descriptor_set(),
    )?;
    fs::write(
        out.join("permissions.rs"),
        permission_table(&compiler.descriptor_pool())?,
    )?;
    fs::write(
        out.join("schema.rs"),
        field_tables(&compiler.descriptor_pool())?,
    )?;
    Ok(())
}

/// All proto files below `root`, as paths relative to it, in a fixed order.
fn proto_files(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "proto") {
                let relative = path.strip_prefix(root).map_err(io::Error::other)?;
                found.push(relative.to_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}

/// A `match` over method paths, as the source of a function.
fn permission_table(pool: &DescriptorPool) -> Result<String, Box<dyn Error>> {
    let extension = pool
        .get_extension_by_name("hearth.v1.authorization")
        .ok_or("options.proto does not define hearth.v1.authorization")?;
    let mut rows = BTreeMap::new();
    for service in pool.services() {
        for method in service.methods() {
            let options = method.options();
            if !options.has_extension(&extension) {
                continue;
            }
            let path = format!("/{}/{}", service.full_name(), method.name());
            let value = options.get_extension(&extension);
            let message = value.as_message().ok_or("authorization is not a message")?;
            let row = row(message).map_err(|error| format!("{path}: {error}"))?;
            rows.insert(path, row);
        }
    }
    let mut source =
        String::from("fn generated(path: &str) -> Option<Authorization> {\n    match path {\n");
    for (path, row) in rows {
        writeln!(source, "        {path:?} => Some({row}),")?;
    }
    source.push_str("        _ => None,\n    }\n}\n");
    Ok(source)
}

/// One method's authorization as a Rust expression.
fn row(option: &DynamicMessage) -> Result<String, String> {
    let unauthenticated = option
        .get_field_by_name("unauthenticated")
        .and_then(|value| value.as_bool())
        .ok_or("no field unauthenticated")?;
    let need = option
        .get_field_by_name("need")
        .ok_or("no field need")?
        .as_list()
        .ok_or("field need is not a list")?
        .to_vec();
    match (unauthenticated, need.is_empty()) {
        (true, true) => Ok("Authorization::Unauthenticated".to_owned()),
        (false, false) => {
            let need: Vec<String> = need
                .iter()
                .map(|value| permission(option, value))
                .collect::<Result<_, _>>()?;
            Ok(format!("Authorization::Need(&[{}])", need.join(", ")))
        }
        (true, false) => Err("sets both unauthenticated and need".to_owned()),
        (false, true) => Err("sets neither unauthenticated nor need".to_owned()),
    }
}

/// A permission as the path of the generated enum's variant.
fn permission(option: &DynamicMessage, value: &Value) -> Result<String, String> {
    let number = value
        .as_enum_number()
        .ok_or("a permission is not an enum")?;
    let permissions = option
        .descriptor()
        .parent_pool()
        .get_enum_by_name("hearth.v1.Permission")
        .ok_or("options.proto does not define hearth.v1.Permission")?;
    let name = permissions
        .get_value(number)
        .ok_or_else(|| format!("permission {number} has no name"))?
        .name()
        .to_owned();
    if number == 0 {
        return Err(format!("needs {name}, which no subject can hold"));
    }
    let variant: String = name
        .trim_start_matches("PERMISSION_")
        .split('_')
        .map(|word| {
            let (first, rest) = word.split_at(1);
            format!("{first}{}", rest.to_ascii_lowercase())
        })
        .collect();
    Ok(format!("Permission::{variant}"))
}

/// A static for each strictly decoded message, and for each message below it.
fn field_tables(pool: &DescriptorPool) -> Result<String, Box<dyn Error>> {
    let mut pending = Vec::new();
    for name in STRICTLY_READ {
        let message = pool.get_message_by_name(name);
        pending.push(message.ok_or_else(|| format!("{name} is not defined by any proto file"))?);
    }
    let mut tables = BTreeMap::new();
    while let Some(message) = pending.pop() {
        if tables.contains_key(message.full_name()) {
            continue;
        }
        let mut rows = String::new();
        for field in message.fields() {
            let row = field_row(&field).map_err(|why| format!("{}: {why}", field.full_name()))?;
            writeln!(rows, "        {row},")?;
            if let Kind::Message(inner) = field.kind() {
                pending.push(inner);
            }
        }
        tables.insert(message.full_name().to_owned(), (table_name(&message), rows));
    }
    let mut source = String::new();
    for (message, (table, rows)) in tables {
        writeln!(source, "/// `{message}`")?;
        writeln!(
            source,
            "pub static {table}: Message = Message {{\n    fields: &[\n{rows}    ],\n}};"
        )?;
    }
    Ok(source)
}

/// `hearth.v1.NetworkConfig.Route` becomes `NETWORK_CONFIG_ROUTE`. Two messages with the same name
/// in different packages would become two statics with the same name, which the compiler rejects.
fn table_name(message: &MessageDescriptor) -> String {
    let within = message.full_name();
    let within = within
        .strip_prefix(message.package_name())
        .unwrap_or(within);
    let mut name = String::new();
    let mut before = '.';
    for c in within.trim_start_matches('.').chars() {
        if c == '.' || (c.is_ascii_uppercase() && before.is_ascii_lowercase()) {
            name.push('_');
        }
        if c != '.' {
            name.push(c.to_ascii_uppercase());
        }
        before = c;
    }
    name
}

/// A field as a Rust expression.
fn field_row(field: &FieldDescriptor) -> Result<String, String> {
    let kind = match field.kind() {
        _ if field.is_map() || field.is_group() => {
            return Err("strict decoding does not support maps and groups".to_owned());
        }
        Kind::Message(message) => format!("Kind::Message(&{})", table_name(&message)),
        Kind::Bytes | Kind::String => "Kind::Bytes".to_owned(),
        _ if field.is_list() => {
            return Err("strict decoding does not support repeated (packed) numbers".to_owned());
        }
        Kind::Fixed64 | Kind::Sfixed64 | Kind::Double => "Kind::Fixed64".to_owned(),
        Kind::Fixed32 | Kind::Sfixed32 | Kind::Float => {
            return Err("strict decoding does not support 32-bit fixed-size numbers".to_owned());
        }
        Kind::Enum(_)
        | Kind::Bool
        | Kind::Int32
        | Kind::Int64
        | Kind::Uint32
        | Kind::Uint64
        | Kind::Sint32
        | Kind::Sint64 => "Kind::Varint".to_owned(),
    };
    // A field that is only marked `optional` is in a oneof of its own.
    let optional = field.field_descriptor_proto().proto3_optional();
    let oneof = field.containing_oneof().filter(|_| !optional);
    let oneof = oneof.map(|oneof| oneof.name().to_owned());
    Ok(format!(
        "Field {{ number: {}, name: {:?}, kind: {kind}, repeated: {}, oneof: {oneof:?} }}",
        field.number(),
        field.name(),
        field.is_list(),
    ))
}
